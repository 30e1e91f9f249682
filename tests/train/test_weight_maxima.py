"""The largest magnitudes of weights that AdamW's kernel notes: those that a pass over the weights finds, and never those of older weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from argosy.config.optimizers import RULES
from argosy.config.optimizers.adamw import AdamWSpec
from argosy.config.resolve import resolve_model
from argosy.config.schema import OptimSpec
from argosy.model.build import build_model, initial_weights
from argosy.model.ops import fp8
from argosy.model.ops.choice import kernels
from argosy.model.ops.fp8 import FORWARD, Quantised, largest_of_weights, quantise_weights
from argosy.model.ops.largest import SLOTS, WEIGHT_PARTS, ask_update, asks_update, note_weight, noted_weights
from argosy.parallel.precision import apply_precision
from argosy.train.adamw_update import make_update
from argosy.train.optimizer import Optimizer
from argosy.train.slots import Apply, Group, Slot, Update
from train.test_adamw import DEVICE, UPDATE, state

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
from argosy.model.ops.kernels import fp8_kernel


@pytest.fixture(autouse=True)
def _by_kernels() -> Iterator[None]:
    with kernels(True):
        yield


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each pass that finds largest magnitudes."""
    found: list[int] = []
    compute = fp8_kernel.largest_of

    def counted(*tensors: Tensor) -> Tensor:
        found.append(len(tensors))
        return compute(*tensors)

    monkeypatch.setattr(fp8_kernel, "largest_of", counted)
    return found


def step(slots: list[Slot], gradients: list[Tensor], *, skip: float = 0.0, update: Apply = UPDATE) -> None:
    for slot, gradient in zip(slots, gradients, strict=True):
        slot.parameter.grad_dtype = gradient.dtype
        slot.parameter.grad = gradient
    arguments = torch.tensor([0.5, skip, 3.0], device=DEVICE).unbind()
    Group(update, 0.1, 1.0, slots).apply(Update(0.01, *arguments))


def largest(weight: Tensor) -> float:
    return float(weight.detach().abs().max())


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_it_is_the_largest_of_the_new_weights_and_the_update_has_the_same_bits(skip: float) -> None:
    plain, measured = state(), state()
    # Several programs raise each part of this one.
    count = 2 * WEIGHT_PARTS * 4096 + 100
    for slots, gradients in (plain, measured):
        own = nn.Parameter(torch.linspace(-3, 2, count, device=DEVICE).bfloat16())
        moments = {key: torch.ones(count, device=DEVICE) for key in slots[0].state}
        slots.append(Slot("large", own, own.detach().float(), moments))
        gradients.append(torch.linspace(-1, 1, count, device=DEVICE).bfloat16())
    for slot in measured[0]:
        ask_update(slot.parameter)
    step(*plain, skip=skip)
    step(*measured, skip=skip)
    for one, other in zip(plain[0], measured[0], strict=True):
        assert torch.equal(one.parameter, other.parameter)
        assert torch.equal(one.master, other.master)
        assert all(torch.equal(one.state[key], other.state[key]) for key in one.state)
        assert noted_weights(one.parameter) is None
        found = noted_weights(other.parameter)
        assert found is not None
        assert len(found) == WEIGHT_PARTS
        assert float(found.max()) == largest(other.parameter)
        assert not asks_update(other.parameter)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_is_infinite(poison: float, skip: float) -> None:
    """Gradients of a skipped step may be anything, and the elements behind the end of a parameter are none."""
    slots, gradients = state()
    for slot, gradient in zip(slots, gradients, strict=True):
        ask_update(slot.parameter)
        gradient[1] = poison
    step(slots, gradients, skip=skip)
    for slot in slots:
        found = noted_weights(slot.parameter)
        assert found is not None
        assert float(found.max()) == (largest(slot.parameter) if skip else float("inf"))


def test_what_is_behind_the_end_of_a_parameter_does_not_count() -> None:
    """With an eps that is 0 in 32 bits, its update is 0 / 0."""
    slots, gradients = state()
    for slot in slots:
        ask_update(slot.parameter)
    step(slots, gradients, update=make_update(AdamWSpec(eps=1e-60), nn.Module()))
    for slot in slots:
        found = noted_weights(slot.parameter)
        assert found is not None
        assert float(found.max()) == largest(slot.parameter) < float("inf")


def weights(*shapes: tuple[int, int]) -> list[Slot]:
    generator = torch.Generator().manual_seed(2)
    slots = []
    for shape in shapes:
        own = nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16))
        moments = {key: torch.zeros(shape, device=DEVICE) for key in ("exp_avg", "exp_avg_sq")}
        slots.append(Slot(str(len(slots)), own, own.detach().float(), moments))
    return slots


def some_gradients(slots: list[Slot]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(slot.master.shape, generator=generator).to(slot.part) for slot in slots]


def by_a_pass(*given: Tensor) -> Quantised:
    return fp8_kernel.quantise([weight.detach().clone() for weight in given], FORWARD)


def same(one: Quantised, other: Quantised) -> bool:
    return all(
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("poison", [None, float("nan")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_are_rounded_with_the_scale_of_a_pass_without_one(
    count: int, poison: float | None, passes: list[int]
) -> None:
    slots = weights((32, 48), (16, 48))[:count]
    own = [slot.parameter for slot in slots]
    assert same(quantise_weights(*own), by_a_pass(*own))
    for _ in range(3):
        gradients = some_gradients(slots)
        if poison is not None:
            gradients[-1][3, 4] = poison
        step(slots, gradients)
        passes.clear()
        rounded = [quantise_weights(*order) for order in (own, own[::-1])]
        assert passes == []
        assert same(rounded[0], by_a_pass(*own))
        assert same(rounded[1], by_a_pass(*own[::-1]))


def test_a_step_without_8_bit_passes_measures_nothing() -> None:
    slots = weights((32, 48))
    quantise_weights(slots[0].parameter)
    for _ in range(2):
        step(slots, some_gradients(slots))
    assert noted_weights(slots[0].parameter) is None


def test_more_weights_than_there_are_parts_are_read(passes: list[int]) -> None:
    slots = weights(*[(4, 16)] * (SLOTS // WEIGHT_PARTS + 1))
    own = [slot.parameter for slot in slots]
    quantise_weights(*own)
    step(slots, some_gradients(slots))
    assert same(quantise_weights(*own), by_a_pass(*own))
    assert noted_weights(*own) is None
    found = noted_weights(*own[1:])
    assert found is not None
    assert len(found) == SLOTS


def test_one_weight_without_an_update_has_all_read() -> None:
    first, second = weights((32, 48), (16, 48))
    own = [first.parameter, second.parameter]
    quantise_weights(*own)
    second.parameter.requires_grad_(False)
    step([first], some_gradients([first]))
    assert noted_weights(*own) is None
    assert same(quantise_weights(*own), by_a_pass(*own))


def _in_place(slot: Slot) -> None:
    slot.part.mul_(2)


def _by_a_view(slot: Slot) -> None:
    slot.parameter.detach()[0].fill_(9)


def _assigned(slot: Slot) -> None:
    slot.parameter.data = 2 * slot.parameter.data


def _unasked(slot: Slot) -> None:
    slot.parameter.argosy_asks_update = False  # type: ignore[attr-defined]
    step([slot], some_gradients([slot]))


def _by_torch(slot: Slot) -> None:
    with kernels(False):
        step([slot], some_gradients([slot]))


@pytest.mark.parametrize("change", [_in_place, _by_a_view, _assigned, _unasked, _by_torch])
def test_a_changed_weight_is_read_again(change: Callable[[Slot], None], passes: list[int]) -> None:
    [slot] = slots = weights((32, 48))
    quantise_weights(slot.parameter)
    step(slots, some_gradients(slots))
    quantise_weights(slot.parameter)
    passes.clear()
    with torch.no_grad():
        change(slot)
    assert noted_weights(slot.parameter) is None
    assert same(quantise_weights(slot.parameter), by_a_pass(slot.parameter))
    assert passes == [1, 1]


def test_what_is_captured_or_compiled_reads_the_weight(monkeypatch: pytest.MonkeyPatch, passes: list[int]) -> None:
    [slot] = slots = weights((32, 48))
    quantise_weights(slot.parameter)
    step(slots, some_gradients(slots))
    assert largest_of_weights(slot.parameter) is not None
    slot.parameter.argosy_asks_update = False  # type: ignore[attr-defined]
    passes.clear()
    monkeypatch.setattr(fp8, "_is_repeated", lambda weight: True)
    assert same(quantise_weights(slot.parameter), by_a_pass(slot.parameter))
    assert passes == [1, 1]
    assert not asks_update(slot.parameter)


if DEVICE == "cuda":

    def test_a_captured_graph_measures_the_weights_of_its_replay() -> None:
        [slot] = slots = weights((32, 48))
        quantise_weights(slot.parameter)
        step(slots, some_gradients(slots))
        assert largest_of_weights(slot.parameter) is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rounded = quantise_weights(slot.parameter)
        slot.part.detach().mul_(2)
        graph.replay()
        assert same(rounded, by_a_pass(slot.parameter))


SIZES = ["layers=1", "hidden=32", "heads=2", "ffn=32", "vocab_size=67", "dropout=0"]
SPEC = resolve_model("gpt2", SIZES)


@pytest.mark.parametrize("form", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_every_update_drops_what_was_noted_before(rule: str, precision: str, form: bool) -> None:
    built = build_model(SPEC, DEVICE)
    apply_precision(built, precision)
    optimizer = Optimizer(built, OptimSpec.model_validate({"name": rule, "lr": 1e-3, "min_lr": 1e-4}))
    optimizer.set_weights(initial_weights(built, SPEC, 1))
    for parameter in built.parameters():
        note_weight(parameter, torch.full((WEIGHT_PARTS,), 7.0, device=DEVICE))
        parameter.grad = torch.randn_like(parameter)
    with kernels(form):
        optimizer.step(tokens=1, lr=0.01)
    assert [name for name, parameter in built.named_parameters() if noted_weights(parameter) is not None] == []


def test_weights_that_are_set_drop_what_was_noted_before() -> None:
    built = build_model(SPEC)
    apply_precision(built, "bf16")
    optimizer = Optimizer(built, OptimSpec.model_validate({"name": "adamw", "lr": 1e-3, "min_lr": 1e-4}))
    for change in (
        lambda: optimizer.set_weights(initial_weights(built, SPEC, 1)),
        optimizer.write_parameters,
        lambda: built.load_state_dict(built.state_dict()),
    ):
        for parameter in built.parameters():
            note_weight(parameter, torch.full((WEIGHT_PARTS,), 7.0))
        change()
        assert all(noted_weights(parameter) is None for parameter in built.parameters())


def test_training_has_the_same_bits_and_reads_no_weight_only_to_measure_it(
    monkeypatch: pytest.MonkeyPatch, passes: list[int]
) -> None:
    """The fused layers and the head, whose vocabulary is padded, and a frozen layer, which no update measures."""

    def trained() -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(4)
        built = build_model(SPEC, DEVICE)
        apply_precision(built, "fp8")
        built.layers["0"].attn.out.weight.requires_grad_(False)
        optimizer = Optimizer(built, OptimSpec.model_validate({"name": "adamw", "lr": 1e-2, "min_lr": 1e-4}))
        optimizer.set_weights(initial_weights(built, SPEC, 1))
        found, read = [], []
        for _ in range(2):
            passes.clear()
            tokens, labels = torch.randint(0, 67, (2, 1, 16), device=DEVICE)
            loss = built(tokens, labels)
            loss.total.backward()
            optimizer.step(tokens=16, lr=0.01)
            found.append(loss.total.detach())
            read.append(len(passes))
        return [*found, *optimizer.weights().values()], read

    noted, read = trained()
    monkeypatch.setattr(fp8, "noted_weights", lambda *given: None)
    measured, every = trained()
    assert all(torch.equal(one, other) for one, other in zip(noted, measured, strict=True))
    # Query-key-value, up, down and head.
    assert [before - after for before, after in zip(every, read, strict=True)] == [0, 4]

"""Each Triton kernel computes what its plain twin computes, forward and backward, on a GPU, or on the CPU under Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from argosy.config.resolve import resolve_model  # noqa: E402
from argosy.data.samples.masks import IGNORED  # noqa: E402
from argosy.errors import ArgosyError  # noqa: E402
from argosy.model.build import build_model, initialise  # noqa: E402
from argosy.model.layers import embed  # noqa: E402
from argosy.model.objective import Objective  # noqa: E402
from argosy.model.ops import activation, choice, cross_entropy, fp8, heads, largest, matmul, norm, permute  # noqa: E402
from argosy.model.ops.choice import kernels  # noqa: E402
from argosy.model.ops.kernels import cross_entropy_kernel, heads_kernel, hopper_sums, norm_kernel, row_sums_kernel  # noqa: E402
from argosy.model.ops.token_sums import noted_sums, wants_sums  # noqa: E402
from argosy.model.positions import rope_tables  # noqa: E402

# Interpreted, a kernel treats both 16-bit types alike.
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each row and tile: tiles that few tokens fill several of, in several programs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(heads_kernel, "_TOKENS", 8)
        monkeypatch.setattr(heads_kernel, "_TILES_DOWN", 2)
        monkeypatch.setattr(norm_kernel, "_PROGRAMS", 4)


def both(operation: Callable[..., object], inputs: dict[str, Tensor | None], dtype: torch.dtype) -> None:
    """Run it as a kernel and as plain torch in 64 bits; outputs and all gradients must agree."""
    results = []
    for on in (True, False):
        width = dtype if on else torch.float64
        given = {
            k: None if v is None else (v.detach().to(DEVICE, dtype, copy=True).to(width).requires_grad_(True))
            for k, v in inputs.items()
        }
        with kernels(on):
            out = operation(**given)
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(3)
        loss = sum((t * torch.randn(t.shape, generator=generator).to(dtype).to(t)).sum() for t in outs)
        assert isinstance(loss, Tensor)
        loss.backward()
        results.append([*outs, *(v.grad for v in given.values() if v is not None)])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert float(error) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [48, 130])
def test_norms(dtype: torch.dtype, rms: bool, biased: bool, width: int) -> None:
    x, y = torch.randn(2, 2, 5, width).unbind()
    weight, bias, y_bias = torch.randn(3, width).unbind()
    if rms or not biased:
        bias = None  # type: ignore[assignment]
    both(
        lambda x, weight, bias: norm.split_norm(x, weight, bias, eps=1e-5, rms=rms),
        {"x": x, "weight": weight, "bias": bias},
        dtype,
    )
    both(
        lambda x, y, y_bias, weight, bias: norm.add_norm(x, y, y_bias, weight, bias, eps=1e-5, rms=rms),
        {"x": x, "y": y, "y_bias": y_bias if biased else None, "weight": weight, "bias": bias},
        dtype,
    )
    both(norm.add, {"x": x, "y": y, "y_bias": y_bias}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize(
    ("again", "measured"), [("never", False), ("never", True), ("before", False), ("after", True), ("hook", True)]
)
def test_a_norm_sums_the_gradient_of_a_bias_that_was_added_before_it(
    dtype: torch.dtype, rms: bool, again: str, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless something else reads the sum too, and adds to its gradient, or changes the gradient in place."""
    passes: list[torch.Size] = []
    compute = row_sums_kernel.column_sums
    monkeypatch.setattr(row_sums_kernel, "column_sums", lambda x, dtype: passes.append(x.shape) or compute(x, dtype))

    def sum_and_norm(x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = norm.add(x, y, y_bias)
        if again == "hook":
            total.register_hook(lambda gradient: gradient.mul_(2))
        before = [total * 3] if again == "before" else []
        both_parts = norm.split_norm(total, weight, None, eps=1e-5, rms=rms, measured=measured)
        return *both_parts, *before, *([total * 3] if again == "after" else [])

    x, y = torch.randn(2, 2, 5, 48).unbind()
    both(sum_and_norm, {"x": x, "y": y, "y_bias": torch.randn(48), "weight": torch.randn(48)}, dtype)
    assert len(passes) == (again != "never")


def test_a_frozen_bias_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(row_sums_kernel, "column_sums")
    monkeypatch.delattr(heads_kernel, "sum_rows")
    frozen = torch.randn(48, device=DEVICE)
    x, y = (torch.randn(2, 8, 48, device=DEVICE, requires_grad=True) for _ in range(2))
    with kernels(True):
        total = norm.add(x, y, frozen)
        assert not wants_sums(total, 48)
        parts = heads.project_heads(Given(torch.eye(48, device=DEVICE), frozen), total, None, group=1, head_dim=16)
        torch.stack([part * (n + 1) for n, part in enumerate(parts)]).sum().backward()
    # Each column of the projection is in one part.
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(1.0, 4, device=DEVICE).repeat_interleave(16).expand(2, 8, 48))


def test_a_norm_of_queries_does_not_sum_what_the_projection_wants_of_attention() -> None:
    x, weight, bias = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((2, 8, 24), (96, 24), (96,)))
    found: list[Tensor | None] = []
    with kernels(True):
        q, k, v = heads.project_heads(Given(weight, bias), x, None, group=1, head_dim=16)
        assert wants_sums(q, 96)
        q.register_hook(lambda gradient: found.append(noted_sums(gradient)))
        _, normed = norm.split_norm(q, torch.ones(16, device=DEVICE), None, eps=1e-5, rms=True)
        (normed.square() + k + v).sum().backward()
    assert found == [None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("biased", [False, True])
def test_activations(dtype: torch.dtype, kind: str, biased: bool) -> None:
    inputs = {"y": 2 * torch.randn(2, 19, 300), "bias": torch.randn(300) if biased else None}
    both(lambda y, bias: activation.activate(kind, y, bias), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_gated_activations(dtype: torch.dtype, kind: str) -> None:
    inputs: dict[str, Tensor | None] = {"gate": 2 * torch.randn(7, 333), "up": torch.randn(7, 333)}
    both(lambda gate, up: activation.gated(kind, gate, up), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1100])
def test_embedding(dtype: torch.dtype, width: int) -> None:
    tokens = torch.randint(2, 90, (2, 90))
    tokens[torch.rand(2, 90) < 0.8] = 1  # more uses of one row than one program adds up; of the last row none
    both(lambda weight: embed(tokens.to(DEVICE), weight), {"weight": torch.randn(91, width)}, dtype)


@dataclass
class Given:
    """A projection with these weights."""

    weight: Tensor
    bias: Tensor | None
    fuses: bool = False
    plain: bool = True

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ["none", "shared", "per row"])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_heads(dtype: torch.dtype, rope: str, kv_heads: int, group: int, biased: bool) -> None:
    batch, seq, head_dim, hidden = 2, 137 if DEVICE == "cuda" else 11, 16, 24  # a program and a part of one
    positions = {"none": None, "shared": torch.arange(seq)[None], "per row": torch.randint(0, 99, (batch, seq))}[rope]
    tables = (
        None
        if positions is None
        else rope_tables(positions.to(DEVICE), 10_000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim))
    )
    width = kv_heads * (group + 2) * head_dim
    both(
        lambda x, weight, bias: heads.project_heads(Given(weight, bias), x, tables, group=group, head_dim=head_dim),
        {
            "x": torch.randn(batch, seq, hidden),
            "weight": torch.randn(width, hidden) / hidden**0.5,
            "bias": torch.randn(width) if biased else None,
        },
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (64, 32), (528, 77), (700, 300)])
def test_sums_over_rows(dtype: torch.dtype, rows: int, width: int) -> None:
    parts = torch.randn(3, rows, width, device=DEVICE)
    exact = parts.double().sum(1)
    assert row_sums_kernel.sum_rows(parts, dtype).dtype == dtype
    torch.testing.assert_close(row_sums_kernel.sum_rows(parts, torch.float32).double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(row_sums_kernel.sum_rows(parts[1], dtype), exact[1].to(dtype), rtol=8e-3, atol=1e-4)
    rounded = parts.to(dtype)
    found = row_sums_kernel.column_sums(rounded, torch.float32).double()
    torch.testing.assert_close(found, rounded.double().sum((0, 1)), rtol=1e-5, atol=1e-4)
    for empty in (row_sums_kernel.column_sums(rounded[:, :0], dtype), row_sums_kernel.sum_rows(parts[0, :0], dtype)):
        assert torch.equal(empty, torch.zeros(width, device=DEVICE, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("summed", [None, torch.float32])
def test_gradients_that_are_parts_of_one_tensor_are_joined_already(group: int, summed: torch.dtype | None) -> None:
    qkv = torch.randn(2, 48, 2 * (group + 2) * 16, device=DEVICE, dtype=torch.bfloat16)
    room = hopper_sums.room_beside(*(t.transpose(1, 2) for t in heads_kernel.split(qkv, None, group, 16)), True)
    gradients = [t.copy_(torch.randn(t.shape)).transpose(1, 2) for t in room]
    copies = [t.clone(memory_format=torch.contiguous_format) for t in gradients]
    whole, sums = heads_kernel.join(gradients, None, group, summed=summed)
    other, other_sums = heads_kernel.join(copies, None, group, summed=summed)
    assert (whole.data_ptr() == room[0].data_ptr()) is (group == 1)
    assert torch.equal(whole, other)
    assert (sums is None) is (other_sums is None) is (summed is None)
    if sums is not None and other_sums is not None:
        torch.testing.assert_close(sums, other_sums)
    rounded, _ = heads_kernel.join_rounded(gradients, None, group, summed=None)
    for ours, theirs in zip(rounded, heads_kernel.join_rounded(copies, None, group, summed=None)[0], strict=True):
        assert torch.equal(ours.float(), theirs.float())


def test_gradients_of_tensors_that_overlap_get_room_of_their_own() -> None:
    q, k, v = torch.randn(2, 48, 2, 3, 16, device=DEVICE).unbind(3)
    room = hopper_sums.room_beside(q, k, v, True)
    assert len({t.untyped_storage().data_ptr() for t in room}) == 1
    assert len({t.untyped_storage().data_ptr() for t in hopper_sums.room_beside(q, k, v, False)}) == 3
    assert len({t.untyped_storage().data_ptr() for t in hopper_sums.room_beside(q, k, k, True)}) == 3


def test_maxima_that_attention_has_found_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(2, 2, 32, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    expected, _ = heads_kernel.join_rounded(gradients, None, 1, summed=None)
    found = torch.stack([gradient.abs().max().float() for gradient in gradients])
    by_token = [gradient.transpose(1, 2) for gradient in gradients]
    for gradient in by_token:
        largest.note(gradient, found)
    carried = [largest.transposed(gradient) for gradient in by_token]
    with monkeypatch.context() as patch:
        patch.delattr(heads_kernel, "largest_of")
        rounded, _ = heads_kernel.join_rounded(carried, None, 1, summed=None)
    for ours, theirs in zip(rounded, expected, strict=True):
        assert torch.equal(ours.float(), theirs.float())
    # Of one of three, or changed since: they are searched.
    largest.note(carried[1], found.clone())
    assert heads_kernel._noted(carried) is None
    largest.note(carried[1], found)
    assert heads_kernel._noted(carried) is found
    carried[2].mul_(2)
    assert heads_kernel._noted(carried) is None
    assert heads_kernel._noted(gradients) is None


def test_gradients_of_other_layouts_are_not_taken_for_a_joined_one() -> None:
    whole = torch.randn(2, 5, 2, 3, 16, device=DEVICE)
    q, k, v = (t.transpose(1, 2) for t in whole.unbind(3))
    assert heads_kernel.whole_of([q, k, v]) is not None
    for others in (
        [k, q, v],
        [q, v, k],
        [q, k, v.clone()],
        [q, k, k],
        [q[:, :1], k[:, :1], v[:, :1]],
        [q[:1], k[:1], v[:1].flip(2)],
    ):
        assert heads_kernel.whole_of(others) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("biased", [False, True])
def test_cross_entropy(dtype: torch.dtype, z_loss: float, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, vocab = 23, 16, 5003
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 9 * vocab * 4)  # several chunks, the last one smaller
    labels = torch.randint(0, vocab, (tokens,))
    labels[::5] = -100
    inputs = {
        "hidden": torch.randn(tokens, width),
        "weight": torch.randn(vocab, width),
        "bias": torch.randn(vocab) if biased else None,
    }
    both(
        lambda hidden, weight, bias: cross_entropy.linear_cross_entropy(
            hidden, weight, labels.to(DEVICE), bias=bias, z_loss=z_loss, multiple=128 if biased else 1
        ),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_loss_of_a_vocabulary_in_parts_is_that_of_the_whole(dtype: torch.dtype, z_loss: float, on: bool) -> None:
    """With padding, in which nothing counts."""
    ends, rows = [0, 37, 5000, 5003], 6
    logits = (3 * torch.randn(rows, ends[-1])).to(DEVICE, dtype)
    labels = torch.randint(0, ends[-1], (rows,), device=DEVICE)
    labels[:4] = torch.tensor([0, 36, 5002, -100])
    whole = logits.clone()
    with kernels(on):
        expected = cross_entropy.softmax_loss_(whole, labels, z_loss, True, ends[-1])
        parts = [F.pad(logits[:, a:b], (0, 16)) for a, b in pairwise(ends)]
        sizes = [(b - a, a) for a, b in pairwise(ends)]
        every = torch.stack(
            [cross_entropy.row_parts(part, labels, *size) for part, size in zip(parts, sizes, strict=True)]
        )
        for part, (vocab, first) in zip(parts, sizes, strict=True):
            found = cross_entropy.joined_losses_(part, labels, every, z_loss, True, vocab, first)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(
                part[:, :vocab], whole[:, first : first + vocab], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 100
            )
            assert not part[:, vocab:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "width"), [(1300, 1312), (1024, 1040), (1024, 1024), (1500, 1600), (300, 300), (1030, 2000)]
)
def test_rows_of_whole_blocks_and_a_rest(
    vocab: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 512 logits: only the last one is compared with the ends of the vocabulary and of the row."""
    monkeypatch.setattr(cross_entropy_kernel, "_LANES", 64)
    logits = F.pad(5 * torch.randn(6, vocab), (0, width - vocab)).to(DEVICE, dtype)
    labels = torch.tensor([0, vocab - 1, vocab // 2, 511 % vocab, IGNORED, 7], device=DEVICE)
    logits[0, 0], logits[1, 7], logits[2, :vocab], logits[3, 5] = 299.5, 300, -200, -float("inf")
    exact = logits[:, :vocab].double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED)
    lse = exact.logsumexp(1) * (labels != IGNORED)
    (expected.sum() + 1e-3 * lse.square().sum()).backward()
    with kernels(True):
        losses, cross_entropies = cross_entropy.softmax_loss_(logits, labels, 1e-3, True, vocab)
    torch.testing.assert_close(cross_entropies.double(), expected.detach(), rtol=1e-5, atol=1e-4)
    # That of a label without a rival is zero, however large its logit is.
    assert cross_entropies[0] == 0
    assert (cross_entropies >= 0).all()
    torch.testing.assert_close(losses.double(), (expected + 1e-3 * lse.square()).detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        logits[:, :vocab].double(), exact.grad, rtol=max(TOLERANCE[dtype], 1e-3) / 2, atol=TOLERANCE[dtype] / 1000
    )
    assert not logits[:, vocab:].any()


def test_a_choice_of_kernels_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGOSY_KERNELS", "trition")
    with pytest.raises(ArgosyError, match="auto, torch, triton"):
        choice._asked()


def test_without_gradients_the_loss_alone_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> None:
        raise AssertionError("the gradient of the head was computed")

    monkeypatch.setattr(cross_entropy, "add_product", refuse)
    hidden, weight = torch.randn(5, 8), torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(0, 11, (5,))
    with torch.no_grad():
        found, _ = cross_entropy.linear_cross_entropy(hidden, weight, labels)
        torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.t(), labels, reduction="sum"))
    with pytest.raises(AssertionError):
        cross_entropy.linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("label", [11, -7])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int) -> None:
    with kernels(False), pytest.raises(RuntimeError, match="not among the 11 entries"):
        cross_entropy.linear_cross_entropy(torch.randn(2, 8), torch.randn(11, 8), torch.tensor([3, label]))


@pytest.mark.parametrize(
    "preset", ["gpt2", "llama3-1b", "qwen3-0.6b", "mpt-125m-alibi", "mixtral-8x7b", "bert-base", "t5-v1.1-small"]
)
def test_a_whole_model_is_the_same_with_and_without_kernels(preset: str) -> None:
    sizes = ["layers=2", "hidden=32", "heads=4", "head_dim=16", "ffn=48", "vocab_size=97", "max_seq_len=24"]
    few = {
        "llama3-1b": ["kv_heads=2"],
        "qwen3-0.6b": ["kv_heads=2"],
        "mixtral-8x7b": ["kv_heads=2", "moe.experts=4", "moe.ffn=40"],
        "bert-base": ["layers=1", "activation=swiglu", "pair=none", "dropout=0"],
        "t5-v1.1-small": ["layers=1", "decoder_layers=1", "dropout=0"],
    }
    spec = resolve_model(preset, sizes + few.get(preset, []))
    model = build_model(spec, DEVICE)
    initialise(model, spec, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens, labels = torch.randint(0, 97, (2, 2, 24 if DEVICE == "cuda" else 6), device=DEVICE)
    inputs = {"decoder_tokens": tokens.flip(1)} if preset.startswith("t5") else {}
    found = []
    for on in (True, False):
        model.zero_grad()
        with kernels(on):
            loss = model(tokens, labels, Objective(z_loss=1e-3), **inputs)
        loss.total.backward()
        found.append([loss.total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 1 + len(list(model.parameters()))
    for with_kernel, without in zip(*found, strict=True):
        torch.testing.assert_close(with_kernel, without, rtol=1e-4, atol=1e-5 * float(without.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_one_input(dtype: torch.dtype) -> None:
    x, first, second = torch.randn(2, 6, 8), torch.randn(5, 8), torch.randn(7, 8)
    both(
        lambda x, first, second, bias: matmul.matmuls(x, [first, second], [None, bias]),
        {"x": x, "first": first, "second": second, "bias": torch.randn(7)},
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_gradient_cut_along_the_tokens_is_that_of_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "split_of", lambda *_: 4)
    x, weight = torch.randn(2, 6, 8), torch.randn(5, 8)
    both(lambda x, weight: matmul.matmuls(x, [weight], [None])[0], {"x": x, "weight": weight}, dtype)


@pytest.mark.parametrize(
    ("shape", "split"),
    [((5120, 1280), 4), ((1280, 1280), 8), ((3840, 1280), 1), ((8192, 2048), 1), ((3072, 2048), 1)],
)
def test_a_weight_gradient_is_cut_only_where_its_tiles_leave_processors_idle(
    shape: tuple[int, int], split: int
) -> None:
    """On the 132 processors of an H200; the fastest cuts measured there."""
    assert matmul.split_of(*shape, 32768, 132) == split
    assert matmul.split_of(*shape, 32767, 132) == 1  # tokens that cannot be cut evenly


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
@pytest.mark.parametrize("shape", [(100, 48), (4, 5), (132, 257)])
def test_quantising(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (3 * torch.randn(shape)).to(DEVICE, torch.bfloat16)
    with kernels(True):
        found = fp8.quantise(x, dtype)
    with kernels(False):
        expected = fp8.quantise(x, dtype)
    assert float(found.scale) == float(expected.scale)
    assert torch.equal(found.transposed.float(), found.values.float().t())
    if DEVICE == "cuda":
        assert torch.equal(found.values.float(), expected.values.float())
    else:  # Triton's interpreter rounds some values to their other neighbour, and powers of two to half of them
        exact = x.float() / expected.scale
        error = (found.values.float() - exact).abs() / exact.abs().clamp(min=torch.finfo(dtype).tiny)
        assert float(error.median()) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_rounded_to_one(what: float, on: bool) -> None:
    x, weight = torch.randn(16, 32, device=DEVICE).bfloat16(), torch.randn(16, 32, device=DEVICE).bfloat16()
    x[3, 5] = what
    with kernels(on):
        assert not fp8.fp8_matmuls(x, [weight], [None])[0].isfinite().any()
        torch.testing.assert_close(activation.activate("relu", x, None), F.relu(x), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_gated_activations_of_weighted_rows(dtype: torch.dtype, kind: str) -> None:
    inputs: dict[str, Tensor | None] = {
        "gate": 2 * torch.randn(7, 1333), "up": torch.randn(7, 1333), "weight": torch.rand(7)
    }  # fmt: skip
    both(lambda gate, up, weight: activation.gated(kind, gate, up, weight), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "k"), [(48, 2), (5000, 3), (33, 1)])
def test_tokens_go_to_their_experts_and_back(dtype: torch.dtype, width: int, k: int) -> None:
    permutation = permute.sort_by_expert(torch.rand(9, 5, device=DEVICE).topk(k).indices, 5)

    def there_and_back(x: Tensor, factors: Tensor) -> Tensor:
        return permute.combine(permute.dispatch(x, permutation) * factors, permutation)

    both(there_and_back, {"x": torch.randn(9, width), "factors": torch.randn(9 * k, width)}, dtype)


@pytest.mark.parametrize(("rows", "vocab"), [(32768, 50304), (32768, 128256), (4095, 257), (10, 10**9)])
def test_chunks_of_the_loss_are_even_and_within_the_limit(rows: int, vocab: int) -> None:
    each = cross_entropy.chunk_rows(rows, 2 * vocab)
    chunks = -(-rows // each)
    assert each * vocab * 2 <= cross_entropy.CHUNK_BYTES + 256 * vocab * 2
    assert chunks == -(-rows * vocab * 2 // cross_entropy.CHUNK_BYTES) or each == 1
    assert chunks * each - rows < 256 * chunks


class _Gradient(torch.autograd.Function):
    """Passes its input on, and keeps the gradient as the operation before it receives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.kept.append(gradients[0])
        return gradients[0], None


MEASURING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "norm": lambda x, y, w: norm.add_norm(x, y, None, w, None, eps=1e-5, rms=True, measured=True)[1],
    "layer norm": lambda x, y, w: norm.add_norm(x, y, w, w, w, eps=1e-5, rms=False, measured=True)[1],
}


@pytest.mark.parametrize("operation", MEASURING)
def test_a_norm_notes_bounds_of_what_it_writes(operation: str) -> None:
    """Of its result, which the width and the weights bound, and of the gradient that it passes back, the largest magnitude. A tensor that
    was changed since has no note."""
    x, y, weight = (
        torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for shape in ((1, 37, 48), (1, 37, 48), 48)
    )
    with torch.no_grad():
        x[0, 3] *= 1e-3
        x[0, 3, 5] = 1e4  # next to it, the row's other values vanish
        weight[5] = weight.abs().max()
    kept: list[Tensor] = []
    with kernels(True):
        out = MEASURING[operation](x, _Gradient.apply(y, kept), weight)
        (out * torch.randn(out.shape, device=DEVICE).bfloat16()).sum().backward()
    found = largest.noted(out)
    assert found is not None
    assert 0.95 <= float(out.detach().abs().max()) / float(found.max()) <= 1
    found = largest.noted(kept[0])
    assert found is not None
    assert float(found.max()) == float(kept[0].abs().max())
    kept[0].mul_(2)
    assert largest.noted(kept[0]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_notes_a_gradient_that_is_no_number_as_infinite(bad: float) -> None:
    x, y, weight = (torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for shape in ((9, 48), (9, 48), 48))
    kept: list[Tensor] = []
    d_total = torch.zeros(9, 48, device=DEVICE).bfloat16()
    d_total[7, 11] = bad
    with kernels(True):
        total, out = norm.add_norm(x, _Gradient.apply(y, kept), None, weight, None, eps=1e-5, rms=True, measured=True)
        torch.autograd.backward([total, out], [d_total, torch.ones_like(out)])
    found = largest.noted(kept[0])
    assert found is not None
    assert float(found.max()) == float("inf")

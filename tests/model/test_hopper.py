"""Argosy's attention kernels for Hopper. On such a GPU they run; elsewhere they are compiled for it, what is around them runs with
their arithmetic in plain torch, and the kernels before and after them run in Triton's interpreter."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.model.attention import BACKENDS, Case, Mask, bounds_of, choose_backend, explicit_bias
from argosy.model.ops import flash, hopper
from argosy.model.ops.attention_backends import Form, attend
from argosy.model.ops.kernels import (
    heads_kernel,
    hopper_backward,
    hopper_backward_128,
    hopper_backward_head,
    hopper_forward,
    hopper_sums,
    hopper_tiles,
)
from argosy.model.ops.largest import noted, want
from argosy.model.ops.token_sums import noted_sums
from argosy.model.sharding import Share
from argosy.train.kernel_profile import kind_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = hopper.refusal(DEVICE, torch.bfloat16, 64, 128) is None
DTYPE = torch.bfloat16 if HOPPER else torch.float32
ERROR = 3e-2 if HOPPER else 1e-4  # of any 64 tokens of a head, relative to their norm
SHAPES = [(1, 128, 1, 1), (3, 384, 6, 2)]
# What kernels may have trouble with; then where programs have many tiles.
SHAPES += [(1, 128, 2, 1), (2, 256, 3, 3), (2, 640, 16, 2), (1, 1152, 7, 1)] if HOPPER else []
SHAPES += [(4, 2048, 32, 8), (32, 1024, 20, 20), (2, 512, 64, 64), (11, 384, 24, 4)] if HOPPER else []
# Heads for whole programs: of one block of keys and of several, with one query head and with several, fewer and more than processors.
WHOLE = [(1, 128, 131, 131), (33, 256, 16, 4), (13, 384, 40, 20), (2, 1024, 5, 5)]
SHAPES += WHOLE if HOPPER else []


def documents(batch: int, seq: int, share: float) -> Tensor:
    """Return ids of documents of random lengths, 1 / share tokens on average, other ones in each sample."""
    return (torch.rand(batch, seq, device=DEVICE) < share).cumsum(1)


MASKS: dict[str, Callable[[int, int], Mask]] = {
    "plain": lambda batch, seq: Mask(True),
    "documents": lambda batch, seq: Mask(True, documents=documents(batch, seq, 0.01)),
    "three tokens": lambda batch, seq: Mask(True, documents=(torch.arange(seq, device=DEVICE) // 3).expand(batch, seq)),
    "one document": lambda batch, seq: Mask(True, documents=torch.zeros(batch, seq, device=DEVICE, dtype=torch.long)),
    "window": lambda batch, seq: Mask(True, window=min(100, seq - 1)),
    "both": lambda batch, seq: Mask(True, window=min(300, seq - 1), documents=documents(batch, seq, 0.003)),
}


@pytest.fixture
def kernels_or_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels, plain attention with the keys that their bounds hide: what is around them is then tested all the same."""

    def scores_of(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
        places = torch.arange(q.shape[1])
        hidden = (places > places[:, None]) if hidden is None else (places > places[:, None]) | hidden[:, None]
        return (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).masked_fill(hidden, -torch.inf)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        hidden = None if first is None else torch.arange(q.shape[1]) < first[:, :, None]
        scores = scores_of(q, k, scale, hidden)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

    def attend_backward(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None, beside: bool,
        measured: bool, summed: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        group = q.shape[2] // k.shape[2]
        gradients = hopper_sums.room_beside(q, k, v, beside)
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        hidden = None if last is None else torch.arange(q.shape[1])[:, None] > last[:, None, :]
        p = (scores_of(q, k, scale, hidden) - lse[..., None]).exp()
        delta = (out * d_out).sum(-1).transpose(1, 2)[..., None]
        d_s = p * (torch.einsum("bqhd,bkhd->bhqk", d_out, v) - delta) * scale
        d_k, d_v = torch.einsum("bhqk,bqhd->bkhd", d_s, q), torch.einsum("bhqk,bqhd->bkhd", p, d_out)
        d_k, d_v = (t.unflatten(2, (-1, group)).sum(3) for t in (d_k, d_v))
        for room, values in zip(gradients, (torch.einsum("bhqk,bkhd->bqhd", d_s, k), d_k, d_v), strict=True):
            room.copy_(values)
        found = torch.stack([d.abs().max() for d in gradients]).view(torch.int32) if measured else None
        by_blocks = d_out.unflatten(1, (-1, 64)).sum(2).flatten(0, 1).flatten(1)
        sums = hopper_sums.TokenSums(gradients[0].sum(1).flatten(1), by_blocks)
        return hopper_sums.noted_together(gradients, found, sums if summed else hopper_sums.TokenSums(None, None))

    if not HOPPER:
        monkeypatch.setattr(hopper_forward, "attend", attend)
        for module in (hopper_backward, hopper_backward_128, hopper_backward_head):
            monkeypatch.setattr(module, "attend_backward", attend_backward)


@pytest.fixture
def asked_forms(monkeypatch: pytest.MonkeyPatch) -> list[Form]:
    """Return the forms of backward passes, as they are asked for."""
    forms: list[Form] = []
    compute = hopper.backward

    def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        forms.append(arguments[-1])
        return compute(*arguments)

    monkeypatch.setattr(hopper, "backward", backward)
    return forms


def case(mask: Mask, seq: int, queries: Share | None = None, dropout: float = 0.0, head_dim: int = 64) -> Case:
    dtype = torch.bfloat16
    return Case(mask, torch.device("cuda"), dtype, head_dim, seq, dropout, queries=queries or Share((0,), 1))


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "seq", "heads", "kv_heads"), SHAPES)
def test_results_and_gradients_are_those_of_the_explicit_bias(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    mask: str,
    scale: float | None,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (batch, seq, heads, kv_heads) in WHOLE:
        monkeypatch.setattr(hopper, "has_whole_heads", lambda *_: width == 64)
    torch.manual_seed(1)
    together = torch.randn(batch, seq, kv_heads, heads // kv_heads + 2, width, device=DEVICE, dtype=DTYPE)
    q, k, v = together.split((heads // kv_heads, 1, 1), dim=3)
    leaves = [t.flatten(2, 3).transpose(1, 2).detach().requires_grad_() for t in (q.contiguous(), k.contiguous(), v)]
    weights = torch.randn(batch, heads, seq, width, device=DEVICE)
    asked = case(MASKS[mask](batch, seq), seq, head_dim=width)._replace(device=DEVICE, dtype=DTYPE)
    results = []
    for name, dtype in (("hopper", DTYPE), ("explicit", torch.float32)):
        backend = next(b for b in BACKENDS if b.name == name)
        y = backend.prepare(asked._replace(dtype=dtype), scale)(*(leaf.to(dtype) for leaf in leaves))
        results.append((y, *torch.autograd.grad((y.float() * weights).sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        wrong, right = ((t.detach().float().unflatten(2, (-1, 64)).norm(dim=(3, 4))) for t in (ours - theirs, theirs))
        assert float((wrong / right).max()) < ERROR


@pytest.mark.usefixtures("kernels_or_twin")
# More programs than processors, of one head and of many; queries that share keys, and none that do.
@pytest.mark.parametrize(
    ("batch", "seq", "heads", "kv_heads"), [(3, 1024, 48, 8), (1, 32768, 4, 2), (16, 1024, 12, 12), (22, 1024, 12, 12)] if HOPPER else [(3, 128, 6, 1)]
)  # fmt: skip
@pytest.mark.parametrize("mask", ["plain", "documents", "window"])
@pytest.mark.parametrize("width", [64, 128])
def test_results_and_gradients_repeat_where_bits_must(
    batch: int, seq: int, heads: int, kv_heads: int, width: int, mask: str
) -> None:
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, d_out = (torch.randn(batch, seq, n, width, device=DEVICE, dtype=DTYPE) for n in sizes)
    runs = []
    asked = case(MASKS[mask](batch, seq), seq)._replace(device=DEVICE)
    form = Form(True, None, None, bounds_of(asked))
    for _ in range(20 if HOPPER else 2):
        out, lse = hopper.forward(q, k, v, form)
        runs.append((out, lse, *hopper.backward(d_out, q, k, v, out, lse, form)))
    assert all(torch.equal(first, other) for run in runs[1:] for first, other in zip(runs[0], run, strict=True))


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize("mask", ["plain", "documents"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("largest", [0, 1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_the_gradients_of_parts_of_one_tensor_are_those_of_copies(
    width: int, mask: str, largest: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "has_whole_heads", lambda *_: whole and width == 64)
    torch.manual_seed(3)
    batch, seq, heads = 2, 256, 3
    together = torch.randn(batch, seq, heads, 3, width, device=DEVICE, dtype=DTYPE)
    # Large keys make the gradients of queries large, and the other way round.
    together[:, :, :, :2] *= torch.tensor([[1, 6], [6, 1], [1, 1]][largest], device=DEVICE, dtype=DTYPE)[:, None]
    parts = together.unbind(3)
    d_out = torch.randn(batch, seq, heads, width, device=DEVICE, dtype=DTYPE)
    form = Form(True, None, None, bounds_of(case(MASKS[mask](batch, seq), seq)._replace(device=DEVICE)), measured=True)
    found = []
    for (q, k, v), beside in ((parts, True), (parts, False), ([part.contiguous() for part in parts], True)):
        out, lse = hopper.forward(q, k, v, form)
        found.append(hopper.backward(d_out, q, k, v, out, lse, form._replace(beside=beside)))
    for ours, apart, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(apart, theirs)
    assert [d.stride() for d in found[0]] == [part.stride() for part in parts]
    assert all(d.is_contiguous() for d in (*found[1], *found[2]))
    for gradients in found:
        sizes = [float(d.abs().max()) for d in gradients]
        assert max(sizes) == sizes[largest]
        one = noted(gradients[0])
        assert one is not None
        assert all(noted(d) is one for d in gradients)
        assert float(one.max()) == max(sizes)


@pytest.mark.usefixtures("kernels_or_twin")
def test_the_largest_gradients_are_noted_where_they_are_wanted(asked_forms: list[Form]) -> None:
    leaves = [torch.randn(1, 2, 128, 64, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    for wanted in (False, True):
        q, k, v = (leaf * 1 for leaf in leaves)
        if wanted:
            want(q)
        attend("hopper", Form(True, None, None), q, k, v).float().square().sum().backward()
    assert [form.measured for form in asked_forms] == [False, True]


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize("mask", ["plain", "documents", "window"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("batch", "heads"), [(2, 3), *([(2, 66), (100, 3)] if HOPPER else [])])
@pytest.mark.parametrize("whole", [False, True])
def test_sums_over_tokens_are_those_of_the_gradients(
    batch: int, heads: int, width: int, mask: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "has_whole_heads", lambda *_: whole and width == 64)
    torch.manual_seed(4)
    q, k, v = torch.randn(batch, 256, heads, 3, width, device=DEVICE, dtype=DTYPE).unbind(3)
    d_out = torch.randn(batch, 256, heads, width, device=DEVICE, dtype=DTYPE)
    form = Form(True, None, None, bounds_of(case(MASKS[mask](batch, 256), 256)._replace(device=DEVICE)))
    out, lse = hopper.forward(q, k, v, form)
    assert noted_sums(hopper.backward(d_out, q, k, v, out, lse, form)[0]) is None
    gradients = hopper.backward(d_out, q, k, v, out, lse, form._replace(summed=True))
    sums = noted_sums(gradients[0])
    assert sums is not None
    expected, size = (
        torch.stack([x.sum((0, 1)) for x in parts], 1).flatten()
        for parts in ([d.double() for d in gradients], [d.double().square() for d in gradients])
    )
    # Both are rounded: relative to the root of the squares, as errors of any sign add up.
    assert float(((sums - expected) / size.sqrt()).abs().max()) < (3e-2 if HOPPER else 1e-4)
    # The sums are in the order of the slots.
    for other in ((q, v, k), (q, k, v.contiguous()), (q, k[:, :, :1], v[:, :, :1])):
        assert noted_sums(hopper.backward(d_out, *other, out, lse, form._replace(summed=True))[0]) is None
    gradients[0].add_(1)
    assert noted_sums(gradients[0]) is None


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize(
    ("group", "frozen", "between", "wanted"),
    [(1, False, False, True), (3, False, False, False), (1, True, False, False), (1, False, True, False)],
)
def test_attention_sums_the_gradient_of_the_bias_of_its_inputs(
    group: int, frozen: bool, between: bool, wanted: bool, asked_forms: list[Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    # The pass over the gradient that is saved.
    monkeypatch.delattr(heads_kernel, "column_sums")
    qkv = torch.randn(2, 128, 2 * (group + 2) * 64, device=DEVICE, dtype=DTYPE, requires_grad=True)
    bias = torch.zeros(qkv.shape[-1], device=DEVICE, requires_grad=not frozen)
    q, k, v = heads_kernel.SplitHeads.apply(qkv, bias, None, group, 64)
    attend("hopper", Form(True, None, None), q * 2 if between else q, k, v).float().square().sum().backward()
    assert [form.summed for form in asked_forms] == [wanted]
    assert qkv.grad is not None
    if frozen:
        assert bias.grad is None
        return
    assert bias.grad is not None
    size = qkv.grad.double().square().sum((0, 1)).sqrt()
    assert float(((bias.grad - qkv.grad.double().sum((0, 1))) / size).abs().max()) < (3e-2 if HOPPER else 1e-4)


@pytest.mark.parametrize(
    ("batch", "seq", "heads", "kv_heads", "width", "plain", "bounded"),
    [
        (32, 1024, 20, 20, 64, True, True),
        (64, 1024, 12, 12, 64, True, True),
        (66, 256, 8, 2, 64, True, False),  # one head a processor: none has another while it waits for a long one
        (16, 1024, 16, 4, 64, False, False),  # too many queries of a KV head
        (16, 2048, 16, 16, 64, False, False),
        (32, 1024, 20, 20, 128, False, False),
        (
            8,
            1024,
            20,
            20,
            64,
            False,
            False,
        ),  # 160 heads: most processors would have one and wait for those that have two
        (1, 1024, 8, 8, 64, False, False),
    ],
)
def test_programs_have_whole_heads_where_these_fill_the_gpu(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    width: int,
    plain: bool,
    bounded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    q, k = (torch.empty(batch, seq, n, width, device="meta") for n in (heads, kv_heads))
    assert [hopper.has_whole_heads(q, k, known) for known in (False, True)] == [plain, bounded]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("group", [1, 3])
def test_a_program_begins_adds_and_ends_the_sum_of_each_query_once(mask: str, group: int) -> None:
    seq, sides = 1152, (hopper_tiles._SIDE.value, hopper_tiles._WORKERS.value)
    bounds = bounds_of(case(MASKS[mask](2, seq), seq)._replace(device=DEVICE))
    lasts = torch.full((2, seq), seq - 1) if bounds is None else bounds.last.expand(2, -1).cpu()
    key_blocks = seq // (sides[0] * sides[1])
    for last in lasts.tolist():
        # The number of the block of queries after the last that sees a block of keys.
        ends = [last[(block + 1) * sides[0] * sides[1] - 1] // sides[0] + 1 for block in range(key_blocks)]
        added: dict[tuple[int, int], list[int]] = {}
        complete: set[tuple[int, int]] = set()
        for turn in range(key_blocks):
            key_block, up = hopper_backward_head._key_block.fn(turn, key_blocks)
            first = key_block * sides[1]
            for step in range((ends[key_block] - first) * group):
                place = hopper_backward_head._visit.fn(step, first, ends[key_block], up, group)
                begins, over = hopper_backward_head._turns_of_sum.fn(
                    place[0], first, ends[key_block - 1] if key_block else first
                )
                assert begins == (place not in added)
                assert place not in complete
                added.setdefault(place, []).append(key_block)
                if over:
                    complete.add(place)
        for block, member in itertools.product(range(seq // sides[0]), range(group)):
            seen = {key_block for key_block in range(key_blocks) if key_block * sides[1] <= block < ends[key_block]}
            assert added[block, member] == sorted(seen, reverse=True)
            assert (block, member) in complete


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize("mask", ["plain", "documents"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "processors", "copies"),
    [(8, 1, 8, 8), (8, 1, 4, 4), (8, 2, 5, 2), (8, 2, 2, 1), (6, 2, 3, 3), (4, 4, 99, 1)],
)
def test_few_programs_of_the_backward_pass_are_cut_by_query_heads(
    heads: int, kv_heads: int, processors: int, copies: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, d_out = (torch.randn(1, 256, n, 128, device=DEVICE, dtype=DTYPE) for n in sizes)
    form = Form(True, None, None, bounds_of(case(MASKS[mask](1, 256), 256)._replace(device=DEVICE)))
    out, lse = hopper.forward(q, k, v, form)
    found = []
    for there in (1, processors):
        monkeypatch.setattr(hopper, "processors", lambda _, there=there: there)
        assert hopper._copies(q, k) == (copies if there > 1 else 1)
        found.append(hopper.backward(d_out, q, k, v, out, lse, form))
    for whole, cut in zip(*found, strict=True):
        assert cut.shape == whole.shape
        assert cut.dtype == whole.dtype
        # Sums of parts are rounded once more.
        assert float((cut - whole).float().norm() / whole.float().norm()) < (4e-3 if HOPPER else 1e-6)


def test_the_kernels_get_tokens_at_equal_distances_in_steps_of_16_bytes() -> None:
    together = torch.randn(2, 128, 4, 3 * 64).bfloat16()
    for kept in (together[..., :64], together[..., 64:128], together[:1, ::2, ..., :64]):
        assert hopper._rows(kept) is kept
    shifted = torch.randn(2 * 128 * 4 * 64 + 1).bfloat16()[1:].view(2, 128, 4, 64)
    same = torch.randn(4, 64).bfloat16().expand(2, 128, 4, 64)
    for copied in (together[..., 1:65], together[:, :100, :, :64], together[..., :64].transpose(1, 2), shifted, same):
        found = hopper._rows(copied)
        assert torch.equal(found, copied)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0


@pytest.mark.parametrize("name", MASKS)
def test_bounds_hide_what_the_mask_hides(name: str) -> None:
    mask = MASKS[name](3, 384)
    asked = case(mask, 384)._replace(device=DEVICE, dtype=torch.float32)
    bounds, places = bounds_of(asked), torch.arange(384, device=DEVICE)
    bias = explicit_bias(asked)
    assert bias is not None
    if bounds is None:
        assert mask.is_plain
        return
    for seen in (places >= bounds.first[:, :, None], places[:, None] <= bounds.last[:, None, :]):
        assert torch.equal((seen & (places[:, None] >= places))[:, None], bias == 0)
    assert all(bool((one.diff() >= 0).all()) and one.dtype == torch.int32 for one in bounds)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_TRITON", "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("on_hopper")
def test_they_are_taken_where_they_can_serve() -> None:
    assert choose_backend(case(Mask(True), 8192)).name == "hopper"
    assert choose_backend(case(Mask(True), 8192, head_dim=128)).name == "hopper"
    assert choose_backend(case(Mask(True, window=7, documents=torch.ones(1, 8192)), 8192)).name == "hopper"
    for refused in (
        case(Mask(True), 8200),
        case(Mask(True), 8192, head_dim=96),
        case(Mask(True), 8192, dropout=0.1),
        case(Mask(True), 8192, queries=Share((0,), 2)),
        case(Mask(True, slopes=torch.ones(4)), 8192),
        case(Mask(True, reach=torch.ones(1, 8192)), 8192),
        case(Mask(False), 8192),
        case(Mask(True), 8192)._replace(dtype=torch.float16),
        case(Mask(True), 8192)._replace(device=torch.device("cpu")),
    ):
        assert choose_backend(refused).name != "hopper"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("head_dim", "repeatable", "chosen"),
    [(64, False, "hopper"), (64, True, "hopper"), (128, False, "flash"), (128, True, "hopper")],
)
def test_flash_attn_4_is_taken_only_where_it_is_faster(
    head_dim: int, repeatable: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "INSTALLED", "4.0.0")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    assert choose_backend(case(Mask(True), 8192, head_dim=head_dim)).name == chosen


@pytest.mark.usefixtures("on_hopper")
def test_they_say_why_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        return str(hopper.refusal(torch.device("cuda"), torch.bfloat16, 64, 128))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "capability 9" in why()
    with monkeypatch.context() as patched:
        patched.setenv("ARGOSY_KERNELS", "torch")
        assert why() == "ARGOSY_KERNELS=torch"
    monkeypatch.setattr(hopper, "_TRITON", "3.10.0")
    assert "only with Triton 3.6, 3.7, 3.9" in why()


def test_a_profiler_tells_whose_kernels_ran() -> None:
    modules = (
        vars(hopper_forward)
        | vars(hopper_backward_head)
        | vars(hopper_backward)
        | vars(hopper_backward_128)
        | vars(hopper_sums)
    )
    kinds = ["after", "backward", "backward_128", "backward_head", "before", "forward"]
    ours = sorted(filter(hopper.is_kernel, modules))
    assert ours == [f"_attention_{kind}" for kind in kinds]
    theirs = "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_0"
    torchs = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>"
    assert [flash.is_kernel(name) for name in (theirs, torchs, *ours)] == [True, *[False] * 7]
    assert not hopper.is_kernel(theirs)
    assert {kind_of(name) for name in (theirs, torchs, *ours)} == {"attention"}


@pytest.mark.parametrize("width", hopper_forward._TEAMS)
@pytest.mark.parametrize(
    ("blocks", "group", "kv_heads", "section"), [(2, 1, 1, 1), (6, 1, 6, 3), (4, 4, 6, 2), (10, 7, 2, 2)]
)
def test_the_forward_pass_has_a_worker_for_every_block_of_queries(
    blocks: int, group: int, kv_heads: int, section: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_forward, "gl", SimpleNamespace(minimum=min))
    workers, batch = hopper_forward._TEAMS[width][0], 2
    head_tiles = -(-blocks * group // workers)
    found: list[tuple[int, int, int]] = []
    for number in range(batch * kv_heads * head_tiles):
        pair, tile = hopper_forward._split.fn(number, head_tiles, section)
        parts = [hopper_forward._part.fn(tile, worker, blocks, group, workers) for worker in range(workers)]
        # The first worker has the most keys, the last the fewest: blocks of keys are loaded for these two.
        assert parts[0][0] == max(block for block, _ in parts)
        assert parts[-1][0] == min(block for block, _ in parts)
        working = [hopper_forward._has_queries.fn(tile, worker, blocks, group, workers) for worker in range(workers)]
        found += [(pair, *part) for part, works in zip(parts, working, strict=True) if works]
        # All tiles of a section come before the next section.
        assert pair // section == number // (section * head_tiles)
    assert sorted(found) == list(itertools.product(range(batch * kv_heads), range(blocks), range(group)))


@pytest.mark.parametrize(
    ("kv_heads", "seq", "width", "at_once"),
    [
        (8, 8192, 128, 8),
        (4, 32768, 128, 2),
        (6, 32768, 64, 3),
        (8, 131072, 128, 1),
        (20, 1024, 64, 20),
        (3, 32768, 128, 1),
    ],
)
def test_the_keys_of_heads_that_work_at_a_time_fit_the_cache(kv_heads: int, seq: int, width: int, at_once: int) -> None:
    assert hopper_forward.heads_at_once(kv_heads, seq, width) == at_once


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", ["plain", "documents"])
def test_results_do_not_depend_on_how_many_heads_work_at_a_time(
    mask: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More tiles than programs.
    batch = 8 if HOPPER else 2
    q, k, v = (torch.randn(batch, 384, n, width, device=DEVICE, dtype=DTYPE) for n in (12, 6, 6))
    bounds = bounds_of(case(MASKS[mask](batch, 384), 384)._replace(device=DEVICE))
    results = []
    for cached, at_once in ((2**25, 6), (2 * 384 * width * 2 * 3, 3), (0, 1)):
        monkeypatch.setattr(hopper_forward, "_CACHED", cached)
        assert hopper_forward.heads_at_once(6, 384, width) == at_once
        results.append(hopper_forward.attend(q, k, v, width**-0.5, bounds and bounds.first))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.usefixtures("kernels_or_twin")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_a_query_that_is_not_a_number_is_not_hidden(mask: str, width: int) -> None:
    q, k, v = (torch.randn(1, 4, 256, width, device=DEVICE, dtype=DTYPE) for _ in range(3))
    q[0, 1, 77, 5] = torch.nan
    bounds = bounds_of(case(MASKS[mask](1, 256), 256)._replace(device=DEVICE))
    out = attend("hopper", Form(True, None, None, bounds), q, k, v)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 1, 77]]


@pytest.mark.parametrize("pairs", [1, 6, 7, 32, 640])
@pytest.mark.parametrize("key_blocks", [1, 8, 64, 500])
def test_sections_are_equal_and_no_larger_than_fill_the_gpu(pairs: int, key_blocks: int) -> None:
    section = hopper_tiles.section(pairs, key_blocks)
    assert pairs % section == 0
    assert section == 1 or section * key_blocks <= 128
    larger = [size for size in range(section + 1, pairs + 1) if pairs % size == 0]
    assert all(size * key_blocks > 128 for size in larger)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from argosy.model.ops.kernels import hopper_backward as backward, hopper_backward_128 as wide, hopper_forward as forward
from argosy.model.ops.kernels import hopper_backward_head as whole, hopper_sums as sums

def compiled(kernel, width, blocks, pointers, floats, constants):
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(floats, "fp32") | pointers
    signature |= {name: f"tensordesc<bf16[{rows}, {width}],{forward._LAYOUT!r}>" for name, rows in blocks.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

def bounded(name):
    return {name: "*i32"}, {"BOUNDED": True}

def unbounded(name):
    return {}, {name: None, "BOUNDED": False}

heads = {"KV_HEADS": 8, "GROUP": 4}
for width, kernel in ((64, backward._attention_backward), (128, wide._attention_backward_128)):
    workers, stages, q_slots = forward._TEAMS[width]
    constants = heads | {"SECTION": 4, "WIDTH": width, "WORKERS": workers, "STAGES": stages, "Q_SLOTS": q_slots}
    blocks = {"q": 64, "k": 128, "v": 128, "out": 64}
    for bounds, known in (bounded("first"), unbounded("first")):
        made = compiled(forward._attention_forward, width, blocks, {"lse": "*fp32", "tile_counter": "*i32"} | bounds, ["scale"], constants | known)
        assert made.asm["cubin"] and "wgmma" in made.asm["ptx"]
    logs = {"logs": f"tensordesc<fp32[1, 128],{sums.LOGS!r}>"}
    logs |= {"d_k_out": "*bf16", "d_v_out": "*bf16", "sums": "*i32", "inverse": "*fp32", "largest": "*fp32", "found": "*i32"}
    adds, least = "red.global.add.s32", 4
    if width == 128:
        logs |= {"sums": f"tensordesc<i32[64, 64],{sums._TILE!r}>", "inverse": f"tensordesc<fp32[1, 64],{sums.LOGS!r}>"}
        adds, least = "cp.reduce.async.bulk.tensor", 2
    blocks = dict.fromkeys(["q", "k", "v", "d_out"], 64)
    for (bounds, known), found in ((unbounded("last"), {"found": None}), (bounded("last"), {"found": None}), (unbounded("last"), {})):
        constants = heads | {"SECTION": 2} | known | found
        pointers = {name: kind for name, kind in (logs | bounds).items() if name not in found}
        made = compiled(kernel, width, blocks, pointers, ["scale", "plain_scale"], constants)
        assert made.asm["cubin"] and made.asm["ptx"].count(adds) >= least
blocks = dict.fromkeys(["q", "k", "v", "d_out", "d_q_out", "d_k_out", "d_v_out"], 64)
pointers = {"sums": "*fp32", "query_sums": "*fp32", "found": "*i32", "head_counter": "*i32"}
logs = {"logs": f"tensordesc<fp32[1, 128],{sums.LOGS!r}>"}
for (bounds, known), group, absent in (
    (unbounded("last"), 1, {"found": None}), (bounded("last"), 1, {}), (unbounded("last"), 4, {"query_sums": None}),
):
    constants = {"KV_HEADS": 8, "GROUP": group} | known | absent
    given = {name: kind for name, kind in (pointers | logs | bounds).items() if name not in absent}
    made = compiled(whole._attention_backward_head, 64, blocks, given, ["scale", "plain_scale"], constants)
    assert made.asm["cubin"] and made.asm["ptx"].count("red.relaxed.gpu.global.add.v4.f32") == 8
print("compiled")
"""


def test_they_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=580)
    assert "compiled" in found.stdout, found.stderr


BESIDE = """
import torch
from argosy.model.ops.kernels.hopper_sums import _LEAST, _TWICE, _UNITS, _attention_after as after, _attention_before as before

torch.manual_seed(1)
batch, seq, heads, group = 2, 128, 4, 2
wide = torch.randn(batch, seq, heads, 80)
out, d_out = wide[..., :64], torch.randn(batch, seq, heads, 64)
d_out[0, 3, 1] = 0
k, v = torch.randn(2, batch, seq, heads // group, 64)
k[1, 5, 0, 7] = -9.0
v[0, 77, 1] *= 5
lse, logs = torch.randn(batch, heads, seq), torch.full((batch * heads * seq // 64, 128), 7.0)
sums, inverse = torch.full((batch * heads * seq * 64,), 7, dtype=torch.int32), torch.full((batch * heads * seq,), 7.0)
largest = torch.zeros(batch * heads // group * 2, dtype=torch.int32)
by_blocks = torch.full((2, batch, seq // 64, heads, 64), 7.0)
grid = (batch * heads * seq // 64,)
strides = [stride for x in (out, d_out, k, v) for stride in x.stride()[:3]]
before[grid](out, d_out, k, v, lse, logs, inverse, largest, sums, by_blocks[0], -3.0, seq, heads, *strides, group, 64, 64, _LEAST.value)
assert not sums.any()
torch.testing.assert_close(by_blocks[0], d_out.unflatten(1, (-1, 64)).sum(2))
# Only what the kernel of whole heads reads.
others = logs.clone().fill_(7.0)
zeros = [0] * 6
before[grid](
    out, d_out, None, None, lse, others, None, None, None, by_blocks[1], -3.0, seq, heads, *strides[:6], *zeros, 1, 64, 64, _LEAST.value
)
assert torch.equal(others, logs) and torch.equal(*by_blocks)
blocks = logs.view(batch, heads, -1, 2, 64)
torch.testing.assert_close(blocks[..., 0, :].flatten(2), lse * -3.0)
torch.testing.assert_close(blocks[..., 1, :].flatten(2), -(out * d_out).sum(-1).transpose(1, 2), rtol=1e-5, atol=1e-5)
norms = 1 / inverse.view(batch, heads, seq)
torch.testing.assert_close(norms, d_out.norm(dim=-1).transpose(1, 2).clamp_min(_LEAST.value))
largest = largest.view(torch.float32)
most = largest.view(batch, heads // group, 2)
torch.testing.assert_close(most[..., 0], k.abs().amax((1, 3)))
torch.testing.assert_close(most[..., 1], v.norm(dim=-1).amax(1))
# As the adding warps place what they have: by the formula of their addresses, four values from each; or by rows.
row, column = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
by_fragments = ((row // 16) * 8 + column // 8) * 128 + (row % 8) * 4 + (column % 8) // 2 + (row % 16 // 8 * 2 + column % 2) * 32
assert torch.equal(by_fragments.flatten().sort().values, torch.arange(4096))
numbers = _UNITS.value, _LEAST.value, _TWICE.value, 3
units = (norms * (_TWICE.value * most.prod(-1).repeat_interleave(group, 1) / _UNITS.value)[..., None])
for width in (64, 128):
    added = torch.randint(-(2**30), 2**30, (batch, heads, seq // 64, 64, width), dtype=torch.int32)
    sums = added
    if width == 64:
        sums = torch.empty(batch, heads, seq // 64, 4096, dtype=torch.int32)
        sums[..., by_fragments] = added
    d_q = torch.empty(batch, seq, heads, width + 32)[..., :width]
    places, found = d_q.stride()[1:3], torch.zeros(3, dtype=torch.int32)
    by_blocks = torch.full((batch, seq // 64, heads, width), 7.0)
    after[grid](sums, inverse, largest, d_q, found, by_blocks, seq, heads, *places, 0.5, group, width, 64, *numbers)
    torch.testing.assert_close(by_blocks, d_q.unflatten(1, (-1, 64)).sum(2), rtol=1e-4, atol=1e-3)
    assert found.view(torch.float32).max() == d_q.abs().max() and found.all()
    wanted = added.flatten(2, 3) * units[..., None] * 0.5
    torch.testing.assert_close(d_q, wanted.transpose(1, 2))
# What is not finite makes gradients that are no numbers: in dO of its query, in K or V of all queries of the head.
d_out[1, 2, 3, 4], d_out[1, 9, 2, 0], k[0, 9, 1, 0], v[1, 100, 0, 63] = torch.nan, torch.inf, torch.inf, torch.nan
largest = torch.zeros_like(largest, dtype=torch.int32)
before[grid](out, d_out, k, v, lse, logs, inverse, largest, sums, None, -3.0, seq, heads, *strides, group, 64, 64, _LEAST.value)
d_q = torch.empty(batch, seq, heads, 64)
sums = torch.zeros(batch * heads * seq * 64, dtype=torch.int32)
found.zero_()
after[grid](sums, inverse, largest.view(torch.float32), d_q, found, None, seq, heads, *d_q.stride()[1:3], 0.5, group, 64, 64, *numbers)
assert found.view(torch.float32).max() == torch.inf
lost = d_q.isnan().all(-1)
assert lost[0, :, 2:].all() and lost[1, :, :2].all() and lost[1, 2, 3] and lost[1, 9, 2] and int(lost.sum()) == 2 * 2 * seq + 2
print("equal")
"""


def test_what_is_prepared_before_and_set_right_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, timeout=580)
    assert "equal" in found.stdout, found.stderr

"""Every back end that takes a mask gives what the explicit bias gives, and that one hides exactly what the mask says."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from argosy.compat import set_deterministic
from argosy.errors import ArgosyError
from argosy.model import attention
from argosy.model.attention import BACKENDS, Case, Mask, choose_backend, explicit_bias
from argosy.model.ops import flash
from argosy.model.positions import alibi_slopes
from argosy.model.sharding import Share
from argosy.parallel.transformer_blocks import recompute_block
from model import flash_twin

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SEQ, HEAD_DIM = 4, 40, 16
DOCUMENTS = torch.tensor([[0] * 13 + [1] * 20 + [2] * 7, [3] * 40], device=DEVICE)
SLOPES = alibi_slopes(HEADS, DEVICE)
CAUSAL = [
    Mask(True, window, slopes, documents)
    for window, slopes, documents in itertools.product((None, 1, 7), (None, SLOPES), (None, DOCUMENTS))
]
MASKS = [*CAUSAL, Mask(False), Mask(False, documents=DOCUMENTS)]


def by_name(name: str) -> attention.Backend:
    return next(backend for backend in BACKENDS if backend.name == name)


def case(mask: Mask, **changes: Any) -> Case:
    return Case(mask.within(SEQ), DEVICE, torch.float32, HEAD_DIM, SEQ, 0.0)._replace(**changes)


def run(name: str, mask: Mask, heads: tuple[Tensor, Tensor, Tensor], **changes: Any) -> Tensor:
    return by_name(name).prepare(case(mask, **changes), None)(*heads)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", MASKS)
def test_the_back_ends_agree(mask: Mask, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    torch.compiler.reset()  # every mask is compiled anew, and only so many forms of one function are kept
    if DEVICE.type == "cpu":  # the same masks and scores in FlexAttention's own slow form, which has no backward pass
        monkeypatch.setattr(attention, "compiled_flex_attention", flex_attention)
    q, k, v = (torch.randn(2, heads, SEQ, HEAD_DIM, device=DEVICE) for heads in (HEADS, kv_heads, kv_heads))
    expected = run("explicit", mask, (q, k, v))
    torch.testing.assert_close(run("flex", mask, (q, k, v)), expected, rtol=1e-4, atol=1e-5)
    if mask.is_plain:
        torch.testing.assert_close(run("sdpa", mask, (q, k, v)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch tells why a CPU has no flash attention
@pytest.mark.parametrize("mask", CAUSAL)
def test_some_queries_get_what_they_get_among_all(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    torch.compiler.reset()
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention, "compiled_flex_attention", flex_attention)
    q, k, v = (torch.randn(2, heads, SEQ, HEAD_DIM, device=DEVICE) for heads in (HEADS, 2, 2))
    share = Share((1, 2), 4)
    expected = share.take(run("explicit", mask, (q, k, v)), 2)
    for name in ("explicit", "flex", "pieces"):
        if name != "pieces" or mask.is_plain:
            found = run(name, mask, (share.take(q, 2), k, v), queries=share)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pieces_of_the_queries_can_be_recomputed() -> None:
    share = Share((1, 2), 4)
    attend = by_name("pieces").prepare(case(Mask(True), queries=share), None)

    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attend(share.take(x.exp(), 2), x, x)

    torch.manual_seed(1)
    x = torch.randn(2, HEADS, SEQ, HEAD_DIM, device=DEVICE, requires_grad=True)
    gradients = {}
    for how in ("none", "selective", "full"):
        block = Block()
        if how != "none":
            recompute_block(block, how)
        block(x).square().sum().backward()
        gradients[how], x.grad = x.grad, None
    assert torch.equal(gradients["none"], gradients["selective"])
    assert torch.equal(gradients["none"], gradients["full"])


FLASH = flash.refusal(DEVICE, torch.bfloat16, HEAD_DIM) is None
FLASH_DTYPE = torch.bfloat16 if FLASH else torch.float32
FLASH_SHARES = [(mask, None) for mask in (Mask(True), Mask(False), Mask(True, window=1), Mask(True, window=7))] + [
    (Mask(True, window), Share((1, 2), 4)) for window in (None, 1, 7)
]


@pytest.fixture
def flash_or_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    if not FLASH:
        monkeypatch.setattr(flash, "_interface", lambda: flash_twin)


@pytest.mark.usefixtures("flash_or_twin")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("mask", "share"), FLASH_SHARES)
def test_flash_gives_results_and_gradients_of_the_explicit_bias(mask: Mask, share: Share | None, kv_heads: int) -> None:
    torch.manual_seed(1)
    whole = Share((0,), 1)
    q, k, v = (
        torch.randn(2, SEQ, heads, HEAD_DIM, device=DEVICE, dtype=FLASH_DTYPE).transpose(1, 2).requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    )
    found, expected = (
        run(name, mask, ((share or whole).take(q, 2), k, v), dtype=FLASH_DTYPE, queries=share or whole)
        for name in ("flash", "explicit")
    )
    near = {"rtol": 2e-2, "atol": 2e-2} if FLASH else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **near)
    weights = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, **near)


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The options of every forward and of every backward pass from now on."""
    interface, forwards, backwards = flash._interface(), list[dict[str, Any]](), list[dict[str, Any]]()

    class Watched:
        @staticmethod
        def flash_attn_func(*args: Any, **options: Any) -> Any:
            forwards.append(options)
            return interface.flash_attn_func(*args, **options)

        @staticmethod
        def _flash_attn_bwd(*args: Any, **options: Any) -> Any:
            backwards.append(options)
            return interface._flash_attn_bwd(*args, **options)

    monkeypatch.setattr(flash, "_interface", lambda: Watched)
    return forwards, backwards


@pytest.mark.usefixtures("flash_or_twin")
@pytest.mark.parametrize("repeatable", [True, False])
def test_flash_is_told_whether_bits_must_repeat(repeatable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, backwards = watched(monkeypatch)
    seq, share = 640, Share((3, 4), 8)  # on a GPU several blocks of keys, some of which no query sees
    q, k, v = (
        torch.randn(2, heads, seq, HEAD_DIM, device=DEVICE, dtype=FLASH_DTYPE, requires_grad=True)
        for heads in (HEADS, 2, 2)
    )
    attend = by_name("flash").prepare(case(Mask(True, window=7), dtype=FLASH_DTYPE, queries=share, seq=seq), None)
    before = torch.are_deterministic_algorithms_enabled()
    set_deterministic(repeatable)
    try:
        first, again = (torch.autograd.grad(attend(share.take(q, 2), k, v).square().sum(), (q, k, v)) for _ in range(2))
    finally:
        set_deterministic(before)
    assert [options["deterministic"] for options in backwards] == [repeatable] * 4
    if repeatable:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.usefixtures("flash_or_twin")
def test_selective_recompute_keeps_what_flash_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return run("flash", Mask(True), (x.exp(), x, x), dtype=FLASH_DTYPE)

    forwards, _ = watched(monkeypatch)
    torch.manual_seed(1)
    x = torch.randn(2, HEADS, SEQ, HEAD_DIM, device=DEVICE, dtype=FLASH_DTYPE, requires_grad=True)
    gradients = {}
    for how in ("none", "selective", "full"):
        forwards.clear()
        block = Block()
        if how != "none":
            recompute_block(block, how)
        block(x).square().sum().backward()
        assert len(forwards) == (2 if how == "full" else 1)
        gradients[how], x.grad = x.grad, None
    assert torch.equal(gradients["none"], gradients["selective"])
    assert torch.equal(gradients["none"], gradients["full"])


@pytest.mark.usefixtures("flash_or_twin")
@pytest.mark.parametrize("tokens_first", [True, False])
def test_the_operators_lay_their_results_where_a_compiler_expects_them(tokens_first: bool) -> None:
    def heads(count: int) -> Tensor:
        x = torch.randn(
            2, *((SEQ, count) if tokens_first else (count, SEQ)), HEAD_DIM, device=DEVICE, dtype=FLASH_DTYPE
        )
        return x if tokens_first else x.transpose(1, 2)

    q, k, v, d_out = heads(HEADS), heads(2), heads(2), heads(HEADS)
    form = (True, 7, None, None, None)
    out, lse = torch.ops.argosy.attention("flash", q, k, v, *form)
    checked = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.argosy.attention, ("flash", q, k, v, *form), test_utils=checked)
    operands = ("flash", d_out, q, k, v, out, lse, *form)
    torch.library.opcheck(torch.ops.argosy.attention_backward, operands, test_utils=checked)


@pytest.mark.usefixtures("flash_or_twin")
def test_flash_is_compiled_whole() -> None:
    torch.compiler.reset()
    torch.manual_seed(1)
    x = torch.randn(2, HEADS, SEQ, HEAD_DIM, device=DEVICE, dtype=FLASH_DTYPE, requires_grad=True)
    attend = by_name("flash").prepare(case(Mask(True, window=7), dtype=FLASH_DTYPE), None)

    def work(x: Tensor) -> Tensor:
        return attend(x * 2, x, x + 1).sin()

    compiled = torch.compile(work, fullgraph=True, backend="inductor" if FLASH else "aot_eager")
    results = []
    for how in (work, compiled):
        y = how(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if FLASH else 1e-4, atol=1e-2 if FLASH else 1e-5)


@pytest.fixture
def flash_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed, beside the GPU it was measured on."""
    monkeypatch.setattr(flash, "INSTALLED", "4.0.0b36")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("flash_installed")
def test_flash_is_taken_where_it_can_serve() -> None:
    serves = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}
    for mask in (Mask(True), Mask(False), Mask(True, window=7)):
        assert choose_backend(case(mask, **serves)).name == "flash"
    assert choose_backend(case(Mask(True), **serves, queries=Share((0,), 2))).name == "flash"
    assert choose_backend(case(Mask(True, slopes=SLOPES), **serves)).name == "flex"


@pytest.mark.parametrize("package", ["4.0.0b36", None])
def test_a_back_end_is_chosen_inside_a_compiled_model(
    package: str | None, flash_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "INSTALLED", package)
    torch.compiler.reset()

    asked = Case(Mask(True), torch.device("cuda"), torch.bfloat16, 64, SEQ, 0.0)

    def choose(x: Tensor) -> Tensor:
        return x + (1 if choose_backend(asked).name == "flash" else 2)

    compiled = torch.compile(choose, fullgraph=True, backend="aot_eager")
    assert int(compiled(torch.tensor(0))) == (1 if package else 2)


@pytest.mark.usefixtures("flash_installed")
def test_flash_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for refused, mask, changes in (
        ("16-bit", Mask(True), {"dtype": torch.float32}),
        ("multiple of 8", Mask(True), {"head_dim": 36}),
        ("128", Mask(True), {"head_dim": 160}),
        ("dropout", Mask(True), {"dropout": 0.1}),
        ("windows", Mask(True, slopes=SLOPES), {}),
        ("windows", Mask(True, documents=DOCUMENTS), {}),
        ("causal", Mask(False, window=7), {}),
        ("causal", Mask(False), {"queries": Share((0,), 2)}),
        ("GPU", Mask(True), {"device": torch.device("cpu")}),
    ):
        why = by_name("flash").refuses(case(mask, **{"device": gpu, "dtype": torch.bfloat16, **changes}))
        assert why is not None
        assert refused in why
    with monkeypatch.context() as patched:
        patched.setenv("ARGOSY_KERNELS", "torch")
        assert flash.refusal(gpu, torch.bfloat16, 64) == "ARGOSY_KERNELS=torch"
    with monkeypatch.context() as patched:
        patched.setattr(flash, "INSTALLED", None)
        assert "not installed" in str(flash.refusal(gpu, torch.bfloat16, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "capability" in str(flash.refusal(gpu, torch.bfloat16, 64))


def test_a_flash_package_that_cannot_be_loaded_is_an_error_not_a_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    with pytest.raises(ArgosyError, match=r"cannot be loaded") as error:
        flash._interface.__wrapped__()
    assert error.value.code == "device.broken-package"


@pytest.mark.parametrize("mask", MASKS)
def test_the_explicit_bias_says_for_each_pair_what_the_mask_says(mask: Mask) -> None:
    bias = explicit_bias(case(mask))
    full = torch.zeros(2, HEADS, SEQ, SEQ) + (0.0 if bias is None else bias.cpu())
    for row, query, key in itertools.product(range(2), range(SEQ), range(SEQ)):
        hidden = mask.causal and key > query
        hidden |= mask.window is not None and query - key >= mask.window
        hidden |= mask.documents is not None and bool(DOCUMENTS[row, query] != DOCUMENTS[row, key])
        found = full[row, :, query, key]
        if hidden:
            assert bool((found == -torch.inf).all())
        elif mask.slopes is not None:
            torch.testing.assert_close(found, -mask.slopes.cpu() * (query - key))
        else:
            assert bool((found == 0).all())


def test_the_first_back_end_that_can_is_taken() -> None:
    gpu = torch.device("cuda")
    assert choose_backend(case(Mask(True))).name == "sdpa"
    assert choose_backend(case(Mask(True, window=SEQ))).name == "sdpa"  # too wide to matter
    assert choose_backend(case(Mask(True), device=gpu, queries=Share((0,), 2))).name == "pieces"
    assert choose_backend(case(Mask(True), device=torch.device("cpu"), queries=Share((0,), 2))).name == "explicit"
    assert choose_backend(case(Mask(True, slopes=SLOPES), device=gpu, queries=Share((0,), 2))).name == "flex"
    assert choose_backend(case(Mask(True, slopes=SLOPES), device=torch.device("cpu"))).name == "explicit"
    assert choose_backend(case(Mask(True, slopes=SLOPES), device=gpu)).name == "flex"
    assert choose_backend(case(Mask(True, slopes=SLOPES), device=gpu, dropout=0.1)).name == "explicit"
    assert choose_backend(case(Mask(True, slopes=SLOPES), device=gpu, head_dim=8)).name == "explicit"
    assert choose_backend(case(Mask(False, bias=torch.zeros(1, HEADS, SEQ, SEQ)), device=gpu)).name == "explicit"

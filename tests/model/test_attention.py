"""Every back end that takes a mask gives what the explicit bias gives, and that one hides exactly what the mask says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from argosy.model import attention
from argosy.model.attention import BACKENDS, Case, Mask, choose_backend, explicit_bias
from argosy.model.positions import alibi_slopes
from argosy.model.share import Share

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
    return Case(mask.within(SEQ), DEVICE, torch.float32, HEAD_DIM, 0.0)._replace(**changes)


def run(name: str, mask: Mask, heads: tuple[Tensor, Tensor, Tensor], **changes: Any) -> Tensor:
    return by_name(name).prepare(case(mask, **changes), SEQ, None)(*heads)


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


@pytest.mark.parametrize("mask", MASKS)
def test_the_explicit_bias_says_for_each_pair_what_the_mask_says(mask: Mask) -> None:
    bias = explicit_bias(case(mask), SEQ)
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

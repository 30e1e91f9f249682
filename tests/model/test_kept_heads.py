"""What attention keeps for its backward pass, counted in memory, is what the planner counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.families.family_registry import plan_of
from argosy.model.attention import Case, Mask, _by_pieces
from argosy.model.layers import Attention
from argosy.model.ops.choice import kernels
from argosy.model.positions import Context, rope_frequencies, rope_tables
from argosy.parallel import cp
from argosy.plan.calibration import calibration
from argosy.plan.layouts import Layout, Work
from argosy.plan.memory import kept_of_attention

SAMPLES, TOKENS, HEAD = 2, 16, 32
SMALL = ["layers=1", "hidden=128", "heads=8", f"head_dim={HEAD}", "ffn=64", "vocab_size=64", "max_seq_len=64"]


class Kernel(torch.autograd.Function):
    """Keeps what attention kernels keep: queries, keys, values and the result, as they lie in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.transpose(1, 2).shape)
        ctx.save_for_backward(q, k, v, out)
        return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = Kernel.apply(q, k, v)
    return out.transpose(1, 2)


class Gathered(torch.autograd.Function):
    """The tensors of all ranks, of which there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return torch.stack([x] * ranks)


def context_parallel(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Callable[..., Tensor]:
    """Return attention of the first of some ranks that share a sequence, with collectives that need no others."""

    def prepare(mask: Mask, x: Tensor, seq: int, head_dim: int, *, queries: Any, **_: Any) -> Callable[..., Tensor]:
        return _by_pieces(Case(mask, x.device, x.dtype, head_dim, seq, 0.0, queries=queries), attend)

    monkeypatch.setattr(cp, "prepare_attention", prepare)
    monkeypatch.setattr(cp, "gather_ahead", lambda x, _: SimpleNamespace(land=partial(Gathered.apply, x, ranks)))
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    return cp._gathering(cp.Cut(group), Mask(causal=True), torch.zeros(SAMPLES, TOKENS, 1), TOKENS, HEAD)


def kept_by(spec: ModelSpec, attend: Callable[..., Tensor], on: bool) -> float:
    """Return the bytes per token of all memory that the backward pass of attention needs, but the input's and the parameters'."""
    module = Attention(spec).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    rope = None
    if spec.positions == "rope":
        frequencies = rope_frequencies(HEAD, plan_of(spec)[0].attention, torch.device("cpu"))
        rope = rope_tables(torch.arange(TOKENS)[None], frequencies)
    x = torch.randn(SAMPLES, TOKENS, 128).bfloat16().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with kernels(on), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(x, Context(rope, attend))
    others = {t.untyped_storage().data_ptr() for t in (x, *module.parameters(), *(rope or ()))}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for place, size in sizes.items() if place not in others) / (SAMPLES * TOKENS)


FORMS = {
    "rope": ("llama3-1b", ()),
    "rope, normed": ("llama3-1b", ("qk_norm=true",)),
    "learned positions": ("gpt2", ("dropout=0",)),
    "learned positions, normed": ("gpt2", ("dropout=0", "qk_norm=true")),
}


# Norms in plain torch also keep 32-bit copies of what they read.
CASES = [(form, on) for form in FORMS for on in (False, True) if on or "normed" not in form]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("form", "on"), CASES)
def test_it_is_what_the_planner_counts(form: str, kv_heads: int, on: bool) -> None:
    preset, more = FORMS[form]
    spec = resolve_model(preset, [*SMALL, f"kv_heads={kv_heads}", *more])
    planned = sum(kept_of_attention(Work(spec, TOKENS, SAMPLES), Layout(), calibration().stacks["argosy"]))
    # Norms also keep one or two 32-bit numbers of each head.
    statistics = 8 * (8 + kv_heads) * spec.qk_norm
    assert planned <= kept_by(spec, attend, on) <= planned + statistics


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_ranks_that_share_a_sequence_keep_the_keys_of_all(
    kv_heads: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve_model("llama3-1b", [*SMALL, f"kv_heads={kv_heads}"])
    work, layout = Work(spec, ranks * TOKENS, SAMPLES), Layout(cp=ranks)
    planned = sum(kept_of_attention(work, layout, calibration().stacks["argosy"]))
    assert kept_by(spec, context_parallel(monkeypatch, ranks), on=True) == planned

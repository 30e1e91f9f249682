"""Causal attention by Argosy's own Hopper kernels, for heads of 64 and 128, with documents and windows.

Their results are deterministic, and they are about as fast as the fastest kernels whose results are not. They are written in Gluon, whose
interface changes between versions of Triton, so they run only with versions they were measured with (docs/benchmarks.md says in which form).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from argosy.model.ops.choice import gpu_refusal, installed
from argosy.model.ops.matmul import processors

if TYPE_CHECKING:
    from argosy.model.ops.attention_backends import Form

_TRITON: Final = installed("triton")
# The versions of Triton with which kernels written in Gluon have passed their tests on a GPU and were timed in steps.
MEASURED = ("3.6.", "3.7.", "3.9.")
_CAPABILITIES = (9,)
_HEAD_DIMS = (64, 128)
# Sequence lengths must be a multiple of this. It is also the number of keys of a tile in the backward pass.
_TOKENS = 128
# Where programs have whole heads: the most queries of a program whose sums of dQ stay in the L2 cache, the least fraction of processors that
# are busy, and the fewest heads of a processor where documents or windows make some heads longer than others.
_CACHED_QUERIES, _BUSY, _UNEVEN_HEADS = 1024, 0.85, 2
# Programs for each processor where they have tiles. Those of the first keys see all queries, those of the last keys none before them.
_PROGRAMS = 1.5


def gluon_refusal(device: torch.device, versions: tuple[str, ...] = MEASURED) -> str | None:
    """Return why kernels written in Gluon for Hopper, measured with these versions of Triton, cannot run on a device, or None."""
    if _TRITON is None or not _TRITON.startswith(versions):
        return f"the kernels are measured only with Triton {', '.join(v.rstrip('.') for v in versions)}"
    return gpu_refusal(device, _CAPABILITIES)


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, seq: int) -> str | None:
    """Return why these kernels cannot run, or None."""
    if why := gluon_refusal(device):
        return why
    if dtype != torch.bfloat16:
        return "the kernels need bf16"
    fits = head_dim in _HEAD_DIMS and seq % _TOKENS == 0
    return (
        None
        if fits
        else f"the kernels need heads of {' or '.join(map(str, _HEAD_DIMS))} and a multiple of {_TOKENS} tokens"
    )


class Kernels(Protocol):
    """A module with a backward kernel."""

    def attend_backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        last: Tensor | None,
        beside: bool,
        measured: bool,
        summed: bool,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def title() -> str:
    """Return what to call these kernels in a report."""
    return "Argosy's own kernels"


def is_kernel(name: str) -> bool:
    """Return whether a kernel name in a profile is one of these kernels."""
    return name.startswith("_attention_")


def forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    from argosy.model.ops.kernels.hopper_forward import attend

    return attend(_rows(q), _rows(k), _rows(v), _scale(form, q), form.bounds and form.bounds.first)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    from argosy.model.ops.kernels import hopper_backward, hopper_backward_128, hopper_backward_head
    from argosy.model.ops.kernels.heads_kernel import whole_of

    whole = has_whole_heads(q, k, form.bounds is not None)
    copies = 1 if whole else _copies(q, k)
    # The kernels write the sums in the order of these slots.
    summed = form.summed and whole_of([t.transpose(1, 2) for t in (q, k, v)]) is not None
    if copies > 1:
        k, v = (t.repeat_interleave(copies, 2) for t in (k, v))
    if whole:
        kernels: Kernels = hopper_backward_head
    else:
        kernels = hopper_backward if q.shape[-1] == 64 else hopper_backward_128
    rows = _rows(d_out), _rows(q), _rows(k), _rows(v)
    last = form.bounds and form.bounds.last
    d_q, d_k, d_v = kernels.attend_backward(*rows, out, lse, _scale(form, q), last, form.beside, form.measured, summed)
    if copies > 1:
        d_k, d_v = (t.unflatten(2, (-1, copies)).sum(3) for t in (d_k, d_v))
    return d_q, d_k, d_v


def has_whole_heads(q: Tensor, k: Tensor, bounded: bool) -> bool:
    """Return whether programs of the backward pass that have whole KV heads keep nearly all processors busy, and their sums of dQ in the L2
    cache."""
    batch, seq, kv_heads, width = k.shape
    queries, heads = seq * (q.shape[2] // kv_heads), batch * kv_heads / processors(q.device)
    busy = heads > _BUSY * math.ceil(heads) and (not bounded or heads >= _UNEVEN_HEADS)
    return width == 64 and queries <= _CACHED_QUERIES and busy


def _copies(q: Tensor, k: Tensor) -> int:
    """Return how many copies of each KV head the backward pass uses, for as many parts of the query heads that share it.

    A program has a block of keys of one KV head, and goes through all queries that see them. If there are few programs, most processors
    are idle: tensor parallelism over as many ranks as the model has KV heads leaves one on each rank.
    """
    batch, seq, kv_heads, _ = k.shape
    group = q.shape[2] // kv_heads
    programs = batch * kv_heads * (seq // _TOKENS)
    enough = _PROGRAMS * processors(q.device)
    return next((n for n in range(1, group) if group % n == 0 and n * programs >= enough), group)


def _scale(form: Form, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if form.scale is None else form.scale


def _rows(x: Tensor) -> Tensor:
    """Return x [batch, seq, heads, head_dim] in a layout the kernels can load, copied if need be.

    Tokens must have a constant stride across the batch, and all strides must be multiples of 16 bytes.
    """
    batch, token, head, column = x.stride()
    even = token > 0 and token % 8 == 0 and head % 8 == 0 and x.data_ptr() % 16 == 0
    fits = column == 1 and (len(x) == 1 or batch == x.shape[1] * token) and even
    return x if fits else x.clone(memory_format=torch.contiguous_format)

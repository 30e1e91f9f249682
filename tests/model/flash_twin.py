"""What flash-attn-4 computes, in plain torch and for its arguments: stands for it where there is no GPU, so that all around its
kernels is tested everywhere. Where there are a GPU and the package, the same tests run the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    assert return_lse
    scores = _scores(q, k, softmax_scale, causal, window_size)
    values = _repeated(v, q)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values.float()).to(q.dtype), scores.logsumexp(-1)


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shares = (_scores(q, k, softmax_scale, causal, (window_size_left, window_size_right)) - lse[..., None]).exp()
    d_shares = torch.einsum("bqhd,bkhd->bhqk", d_out.float(), _repeated(v, q).float())
    row = (d_out.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    d_scores = shares * (d_shares - row) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    d_q = torch.einsum("bhqk,bkhd->bqhd", d_scores, _repeated(k, q).float())
    d_k = torch.einsum("bhqk,bqhd->bkhd", d_scores, q.float())
    d_v = torch.einsum("bhqk,bqhd->bkhd", shares, d_out.float())
    return d_q.to(q.dtype), _summed(d_k, k), _summed(d_v, v)


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool, window: Window) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), _repeated(k, q).float())
    keys = torch.arange(k.shape[1])
    distance = (keys[-q.shape[1] :, None] - keys[None, :]).to(q.device)  # the queries are the last of the keys
    before, after = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if before is not None:
        hidden |= distance > before
    if after is not None:
        hidden |= distance < -after
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(hidden, -torch.inf)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)

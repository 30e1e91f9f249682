"""The Muon update: orthogonalised momentum, for the matrices inside the layers.

The momentum matrix U S V^T is replaced by about U V^T: all its singular directions get the same weight. A few Newton-Schulz
iterations X <- a X + (b A + c A^2) X with A = X X^T do that with matmuls alone, in bf16, on a matrix that was first divided by its
norm. Query, key and value share one parameter but are separate matrices, and so is each expert. Embeddings, head, norms and biases
are updated by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from argosy.config.optimizers.muon import MuonSpec
from argosy.model.layers import Attention, CrossAttention
from argosy.parallel.precision import DTYPES, evaluation_precision
from argosy.parallel.shards import with_whole
from argosy.train.slots import Apply, Slot, Update, write_parameters

# Keller Jordan's coefficients: steepest at zero, singular values end between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7


class Heads(NamedTuple):
    """The layout of rows that hold several matrices, head by head: `parts` heads of each in turn."""

    parts: tuple[int, ...]
    head_dim: int


def make_update(keys: MuonSpec, model: nn.Module) -> Apply:
    return muon(keys, heads_of(model))


def muon(spec: MuonSpec, heads: Mapping[str, Heads]) -> Apply:
    """Return the Muon update. `heads` names the parameters whose rows are more than one matrix."""

    def apply(slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, weight_decay: float) -> None:
        go = 1 - update.skip
        for slot, gradient in zip(slots, gradients, strict=True):
            g = torch.where(go > 0, gradient.float() * update.scale, 0.0)
            momentum = slot.state["momentum"]
            momentum.lerp_(g, (1 - spec.momentum) * go)
            direction = g.lerp(momentum, spec.momentum) if spec.nesterov else momentum
            turn = partial(_direction, heads=heads.get(slot.name), spec=spec)
            change = with_whole(direction, slot.parameter, turn, stacked=direction.ndim == 3)
            slot.master.mul_(1 - update.lr * weight_decay * go).sub_(change * (update.lr * go))
        write_parameters(slots)

    return apply


def heads_of(model: nn.Module) -> dict[str, Heads]:
    """Return the layouts of the parameters that hold several matrices, by name."""
    heads: dict[str, Heads] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            heads[f"{name}.qkv.weight"] = Heads((module.group, 1, 1), module.head_dim)
        elif isinstance(module, CrossAttention):
            heads[f"{name}.kv.weight"] = Heads((1, 1), module.head_dim)
    return heads


def _direction(matrix: Tensor, heads: Heads | None, spec: MuonSpec) -> Tensor:
    if heads is None:
        return orthogonalise(matrix, spec.ns_steps).float() * _scale(matrix, spec)
    slots = matrix.unflatten(0, (-1, sum(heads.parts), heads.head_dim))  # [KV heads, slots, head_dim, in]
    directions = [
        _direction(part.flatten(0, 2), None, spec).unflatten(0, part.shape[:3])
        for part in slots.split(heads.parts, dim=1)
    ]
    return torch.cat(directions, dim=1).flatten(0, 2)


def _scale(matrix: Tensor, spec: MuonSpec) -> float:
    """Return the factor on the learning rate for the shape of a matrix."""
    rows, columns = matrix.shape[-2:]
    if spec.lr_scaling == "original":
        return math.sqrt(max(1.0, rows / columns))
    # Entries are about as large as AdamW's, so that one learning rate serves both.
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Return about U V^T for each matrix U S V^T in [.., out, in], in bf16; in fp32 on a CPU without kernels for bf16."""
    x = matrix.to(DTYPES[evaluation_precision("bf16", matrix.device)]).reshape(-1, *matrix.shape[-2:])
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, gram, x, beta=_A)
    return (x.mT if tall else x).reshape(matrix.shape)

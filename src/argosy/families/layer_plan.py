"""The layer plan: what one layer of a model has that another may have otherwise.

A model is built from its plan, and counted and planned by it. Layers whose attention is of the same kind share one mask and one
table of rotary positions in each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from argosy.config.model import ModelSpec, RopeScaling

# pre: x + f(norm(x)). post: norm(x + f(x)), BERT's. sandwich: x + norm(f(norm(x))), Gemma's.
NormPlacement = Literal["pre", "post", "sandwich"]
NORMS_OF_A_BLOCK: dict[NormPlacement, int] = {"pre": 2, "post": 2, "sandwich": 4}


@dataclass(frozen=True)
class AttentionKind:
    """What attention sees and how positions turn it. `scale` multiplies the scores; None: 1 / sqrt(head_dim)."""

    window: int | None
    rope_theta: float
    rope_scaling: RopeScaling | None
    scale: float | None = None


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its kind of attention, and where its norms stand."""

    attention: AttentionKind
    norms: NormPlacement = "pre"


def attention_kind(spec: ModelSpec, *, local: bool) -> AttentionKind:
    """Return the attention that the keys of a spec describe: that of a layer with the window (`local`), or of a global one."""
    scale = None if spec.query_pre_attn_scalar is None else spec.query_pre_attn_scalar**-0.5
    if local and spec.local_rope_theta is not None:
        return AttentionKind(spec.window, spec.local_rope_theta, None, scale)
    return AttentionKind(spec.window if local else None, spec.rope_theta, spec.rope_scaling, scale)


def plan_layers(spec: ModelSpec, norms: NormPlacement = "pre") -> tuple[LayerPlan, ...]:
    """Return the plan that the keys of a spec describe: layers that are all alike, or, with `global_every`, windows of which every
    so many layers one is global."""
    local = LayerPlan(attention_kind(spec, local=spec.window is not None), norms)
    if spec.global_every is None:
        return (local,) * spec.layers
    everywhere = LayerPlan(attention_kind(spec, local=False), norms)
    return tuple(local if (i + 1) % spec.global_every else everywhere for i in range(spec.layers))

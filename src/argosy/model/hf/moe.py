"""Experts: one matrix each in their files, ours stacked. Mixtral has names of its own; Qwen's are those of the others."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec, MoESpec
from argosy.model.hf.table import Entry, Stacked


def is_mixtral(spec: ModelSpec) -> bool:
    """Whether Mixtral's own class computes this model: a plain softmax router and its experts, in every layer."""
    moe = spec.moe
    if moe is None or spec.qk_norm or not moe.norm_topk or moe.dense_layers or moe.shared_experts:
        return False
    return moe.router == "softmax" and moe.routed_scale == 1 and moe.groups == 1 and moe.bias_rate is None


def experts(spec: ModelSpec, moe: MoESpec, ours: str, theirs: str) -> Iterator[Entry]:
    """The MoE `ours` of a layer, in their layer `theirs`."""
    mixtral = is_mixtral(spec)
    theirs += ".block_sparse_moe" if mixtral else ".mlp"
    yield Entry(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    if moe.bias_rate is not None:
        yield Entry(f"{ours}.router.bias", (f"{theirs}.gate.e_score_correction_bias",))
    for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        of_each = tuple(
            f"{theirs}.experts.{e}.{short if mixtral else name + '_proj'}.weight" for e in range(moe.experts)
        )
        yield Entry(f"{ours}.experts.{name}", of_each, Stacked())
    shared = "shared_expert" if moe.shared_gate else "shared_experts"  # Qwen2-MoE's, DeepSeek's
    for name in ("gate", "up", "down") if moe.shared_experts else ():
        yield Entry(f"{ours}.shared.{name}.weight", (f"{theirs}.{shared}.{name}_proj.weight",))
    if moe.shared_gate:
        yield Entry(f"{ours}.shared_gate.weight", (f"{theirs}.shared_expert_gate.weight",))

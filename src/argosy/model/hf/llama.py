"""Llama, Mistral, Qwen3 and their mixtures of experts: query, key and value apart, a gated MLP or experts; Qwen3 also
norms queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.model.hf.moe import experts
from argosy.model.hf.table import Entry, QueryKeyValue


def llama(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield from attention(spec, f"{ours}.attn", f"{theirs}.self_attn")
        if spec.moe is None or i < spec.moe.dense_layers:
            yield from gated_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            yield from experts(spec, spec.moe, f"{ours}.mlp", theirs)
        yield Entry(f"{ours}.attn_norm.weight", (f"{theirs}.input_layernorm.weight",))
        yield Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    yield Entry("norm.weight", ("model.norm.weight",))
    if not spec.tied:
        yield Entry("head.weight", ("lm_head.weight",))


def attention(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    for kind in ("weight", "bias") if spec.attention_bias else ("weight",):
        qkv = tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv")
        yield Entry(f"{ours}.qkv.{kind}", qkv, QueryKeyValue.of(spec))
        yield Entry(f"{ours}.out.{kind}", (f"{theirs}.o_proj.{kind}",))
    if spec.qk_norm:
        yield Entry(f"{ours}.q_norm.weight", (f"{theirs}.q_norm.weight",))
        yield Entry(f"{ours}.k_norm.weight", (f"{theirs}.k_norm.weight",))


def gated_mlp(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    for kind in ("weight", "bias") if spec.mlp_bias else ("weight",):
        for name in ("gate", "up", "down"):
            yield Entry(f"{ours}.{name}.{kind}", (f"{theirs}.{name}_proj.{kind}",))

"""MPT: query, key and value stacked, no biases anywhere, the head always the embedding."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.model.hf.table import Entry, QueryKeyValue


def mpt(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("transformer.wte.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"transformer.blocks.{i}"
        qkv = QueryKeyValue.of(spec, fused=True)
        yield Entry(f"{ours}.attn.qkv.weight", (f"{theirs}.attn.Wqkv.weight",), qkv)
        yield Entry(f"{ours}.attn.out.weight", (f"{theirs}.attn.out_proj.weight",))
        yield Entry(f"{ours}.mlp.up.weight", (f"{theirs}.ffn.up_proj.weight",))
        yield Entry(f"{ours}.mlp.down.weight", (f"{theirs}.ffn.down_proj.weight",))
        yield Entry(f"{ours}.attn_norm.weight", (f"{theirs}.norm_1.weight",))
        yield Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.norm_2.weight",))
    yield Entry("norm.weight", ("transformer.norm_f.weight",))

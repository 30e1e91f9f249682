"""GPT-2 and GPT-3: matrices are stored transposed, query, key and value side by side, and everything has a bias."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.model.hf.table import SAME, TRANSPOSED, Entry, Layout, QueryKeyValue


def gpt2(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("transformer.wte.weight",))
    yield Entry("embed.positions.weight", ("transformer.wpe.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        yield from _linear(
            f"{ours}.attn.qkv",
            f"{theirs}.attn.c_attn",
            QueryKeyValue.of(spec, fused=True, transposed=True),
            QueryKeyValue.of(spec, fused=True),
        )
        yield from _linear(f"{ours}.attn.out", f"{theirs}.attn.c_proj")
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc")
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj")
        yield from _linear(f"{ours}.attn_norm", f"{theirs}.ln_1", SAME)
        yield from _linear(f"{ours}.mlp_norm", f"{theirs}.ln_2", SAME)
    yield from _linear("norm", "transformer.ln_f", SAME)
    if not spec.tied:
        yield Entry("head.weight", ("lm_head.weight",))


def _linear(ours: str, theirs: str, weight: Layout = TRANSPOSED, bias: Layout = SAME) -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (f"{theirs}.weight",), weight)
    yield Entry(f"{ours}.bias", (f"{theirs}.bias",), bias)

"""T5, 1.0 and 1.1: no biases; the relative position bias is kept by the first layer of each stack."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.model.hf.table import Entry, KeyValue, QueryKeyValue


def t5(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("shared.weight",))
    for side, layers in (("encoder", spec.layers), ("decoder", spec.decoder_layers or spec.layers)):
        relative = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Entry(f"{side}.relative.weight", (relative,))
        for i in range(layers):
            yield from _block(spec, f"{side}.layers.{i}", f"{side}.block.{i}.layer", decoder=side == "decoder")
        yield Entry(f"{side}.norm.weight", (f"{side}.final_layer_norm.weight",))
    if not spec.tied:
        yield Entry("head.weight", ("lm_head.weight",))


def _block(spec: ModelSpec, ours: str, theirs: str, *, decoder: bool) -> Iterator[Entry]:
    attention = f"{theirs}.0.SelfAttention"
    yield Entry(f"{ours}.attn_norm.weight", (f"{theirs}.0.layer_norm.weight",))
    yield Entry(
        f"{ours}.attn.qkv.weight", tuple(f"{attention}.{name}.weight" for name in "qkv"), QueryKeyValue.of(spec)
    )
    yield Entry(f"{ours}.attn.out.weight", (f"{attention}.o.weight",))
    if decoder:
        across = f"{theirs}.1.EncDecAttention"
        yield Entry(f"{ours}.cross_norm.weight", (f"{theirs}.1.layer_norm.weight",))
        yield Entry(f"{ours}.cross.q.weight", (f"{across}.q.weight",))
        yield Entry(f"{ours}.cross.kv.weight", (f"{across}.k.weight", f"{across}.v.weight"), KeyValue(spec.kv_heads))
        yield Entry(f"{ours}.cross.out.weight", (f"{across}.o.weight",))
    place = f"{theirs}.{2 if decoder else 1}"
    yield Entry(f"{ours}.mlp_norm.weight", (f"{place}.layer_norm.weight",))
    dense = f"{place}.DenseReluDense"
    if spec.gated:
        yield Entry(f"{ours}.mlp.gate.weight", (f"{dense}.wi_0.weight",))
    yield Entry(f"{ours}.mlp.up.weight", (f"{dense}.{'wi_1' if spec.gated else 'wi'}.weight",))
    yield Entry(f"{ours}.mlp.down.weight", (f"{dense}.wo.weight",))

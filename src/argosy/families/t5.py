"""T5 1.0 and 1.1: an encoder-decoder without biases. In files, the first layer of each stack has the relative position bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from argosy.config.model import ModelSpec
from argosy.families.architecture import ENCODER_DECODER, LayerPlan, attention_kind
from argosy.families.family import Family, HfFormat, Row, StoredNames, Tree
from argosy.families.hf_keys import Keys
from argosy.families.weight_table import Entry, KeyValue, QueryKeyValue

DEFAULTS: Row = {
    "architecture": "encoder-decoder", "positions": "relative", "norm": "rmsnorm", "norm_bias": False,
    "norm_eps": 1e-6, "activation": "relu", "attention_bias": False, "mlp_bias": False, "tied": True,
    "init_std": 1.0, "dropout": 0.1,
}  # fmt: skip


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, **more: Any) -> Row:
    row = {
        "family": "t5", "layers": layers, "hidden": hidden, "heads": heads, "head_dim": head_dim, "ffn": ffn,
        "vocab_size": 32128, "max_seq_len": 512,
    }  # fmt: skip
    return row | more


def _t5_1_1(layers: int, hidden: int, heads: int, ffn: int) -> Row:
    return _t5(layers, hidden, heads, 64, ffn, activation="geglu", tied=False)


PRESETS: dict[str, Row] = {
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    # T5 1.1: a gated MLP and an untied output head.
    "t5-v1.1-small": _t5_1_1(8, 512, 6, 1024),
    "t5-v1.1-base": _t5_1_1(12, 768, 12, 2048),
    "t5-v1.1-large": _t5_1_1(24, 1024, 16, 2816),
    "t5-v1.1-xl": _t5_1_1(24, 2048, 32, 5120),
    "t5-v1.1-xxl": _t5_1_1(24, 4096, 64, 10240),
}

# For each feed_forward_proj: our activation, and the function that transformers derives from it and also stores. Their
# "gated-gelu" is the tanh form.
_T5_ACTIVATIONS = {
    "relu": ("relu", "relu"),
    "gelu": ("gelu", "gelu"),
    "gelu_new": ("gelu_tanh", "gelu_new"),
    "gated-gelu": ("geglu", "gelu_new"),
    "gated-gelu_new": ("geglu", "gelu_new"),
    "gated-silu": ("swiglu", "silu"),
}
_T5_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "geglu": "gated-gelu", "swiglu": "gated-silu"}


def _read(keys: Keys) -> Tree:
    keys.only("relative_attention_num_buckets", 32)
    keys.only("relative_attention_max_distance", 128)
    keys.only("is_encoder_decoder", True)
    keys.ignore("transformers sets it for each of the two stacks", "is_decoder")
    activation, function = keys.choice("feed_forward_proj", _T5_ACTIVATIONS, "relu")
    # If a file has these two keys, they take precedence over feed_forward_proj.
    keys.only("dense_act_fn", function)
    keys.only("is_gated_act", activation.endswith("glu"))
    # Our samples start a target with the padding token, as every published T5 does.
    pad = keys.take("pad_token_id", 0, null=True)
    if (start := keys.take("decoder_start_token_id", None)) not in (pad, None):
        raise keys.refuse(
            "decoder_start_token_id", start, f"pad_token_id is {pad!r}, and Argosy begins a target with that"
        )
    # An untied head goes with unscaled logits. transformers 5 stores only the scaling.
    tied = keys.take("tie_word_embeddings", True, null=True) is not False
    scaled = keys.take("scale_decoder_outputs", tied)
    if scaled and not tied:
        raise keys.refuse(
            "scale_decoder_outputs", scaled, "tie_word_embeddings is False, and Argosy scales a tied head only"
        )
    return {
        "family": "t5",
        "layers": keys.take("num_layers", 6),
        "decoder_layers": keys.take("num_decoder_layers", None),
        "hidden": keys.take("d_model", 512),
        "heads": keys.take("num_heads", 8),
        "head_dim": keys.take("d_kv", 64),
        "ffn": keys.take("d_ff", 2048),
        "vocab_size": keys.take("vocab_size", 32128),
        "max_seq_len": keys.take("n_positions", 512),
        "activation": activation,
        "norm_eps": keys.take("layer_norm_epsilon", 1e-6),
        "tied": bool(scaled),
        "dropout": keys.take("dropout_rate", 0.1),
        "init_std": keys.take("initializer_factor", 1.0),
    }


def _write(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "num_layers": spec.layers,
        "num_decoder_layers": spec.decoder_layers,
        "d_model": spec.hidden,
        "num_heads": spec.heads,
        "d_kv": spec.head_dim,
        "d_ff": spec.ffn,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_seq_len,
        "feed_forward_proj": _T5_NAMES[spec.activation],
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "dropout_rate": spec.dropout,
        "initializer_factor": spec.init_std,
        "decoder_start_token_id": 0,
    }


def _table(spec: ModelSpec) -> Iterator[Entry]:
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


def _plan(spec: ModelSpec) -> tuple[LayerPlan, ...]:
    """Return T5's plan. T5 does not divide its scores: the initial weights of the queries are smaller instead."""
    kind = replace(attention_kind(spec, local=False), scale=1.0)
    return (LayerPlan(kind),) * sum(ENCODER_DECODER.stacks(spec))


T5 = Family(
    "t5",
    DEFAULTS,
    PRESETS,
    formats={"t5": HfFormat(_read, _write)},
    model_type=lambda spec: "t5",
    table=_table,
    stored=StoredNames(
        copies={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        # transformers 5 starts with one weight for both, also in version 1.1.
        left_out={"lm_head.weight": "shared.weight"},
        # Version 1.0 stores a bias for cross-attention that its own code never reads.
        unused=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    ),
    plan=_plan,
)

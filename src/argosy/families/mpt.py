"""MPT: ALiBi, no biases, and a tied output head. Hugging Face's `mpt` stacks query, key and value.

LLM-Foundry's pretraining recipes leave ALiBi and `no_bias` off. Their models have learned positions and biases in every layer,
which is GPT-2's structure with exact GELU, so the presets of their names belong to the family `gpt` and are exported as `gpt2`.
The models published as mosaicml/mpt-7b and mpt-30b have ALiBi and no biases: `mpt-7b-alibi`, `mpt-30b-alibi`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from argosy.config.model import ModelSpec
from argosy.families.family import Family, HfFormat, Row, StoredNames, Tree
from argosy.families.hf_keys import Keys
from argosy.families.weight_table import Entry, QueryKeyValue

DEFAULTS: Row = {
    "architecture": "decoder", "positions": "alibi", "norm": "layernorm", "norm_bias": False, "norm_eps": 1e-5,
    "activation": "gelu", "attention_bias": False, "mlp_bias": False, "tied": True,
}  # fmt: skip


# (layers, hidden, heads) of LLM-Foundry's pretraining recipes.
_SIZES: dict[str, tuple[int, int, int]] = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def _mpt(size: str, **more: str) -> Row:
    layers, hidden, heads = _SIZES[size]
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab_size": 50368, "max_seq_len": 2048, **more}


PRESETS: dict[str, Row] = {
    **{f"mpt-{size}": _mpt(size, family="gpt", activation="gelu") for size in _SIZES},
    **{f"mpt-{size}-alibi": _mpt(size, family="mpt") for size in _SIZES},
}


def _read(keys: Keys) -> Tree:
    attention = keys.section("attn_config")
    held: tuple[tuple[Any, ...], ...] = (
        ("attn_type", "multihead_attention"), ("alibi", True), ("alibi_bias_max", 8), ("clip_qkv", None),
        ("softmax_scale", None), ("prefix_lm", False), ("qk_ln", False), ("attn_uses_sequence_id", False),
        # From here on, keys that LLM-Foundry writes.
        ("rope", False), ("sliding_window_size", -1), ("fused_qkv", True), ("nope", False), ("qk_gn", False),
    )  # fmt: skip
    for key, *allowed in held:
        attention.only(key, *allowed)
    attention.ignore("it chooses a kernel", "attn_impl")
    attention.ignore("rope is off", "rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config")
    temperature = attention.section("attn_temperature_tuning")
    temperature.only("attn_scale", 0.0)
    temperature.ignore("attn_scale is 0", "floor_scale")
    temperature.finish()
    dropout = keys.same("resid_pdrop", "emb_pdrop", default=0.0)
    if attention.take("attn_pdrop", 0) != dropout:
        raise attention.refuse("attn_pdrop", attention.take("attn_pdrop", 0), f"resid_pdrop is {dropout}")
    attention.finish()
    held = (
        ("expansion_ratio", 4), ("logit_scale", None), ("no_bias", True), ("embedding_fraction", 1.0),
        ("norm_type", "low_precision_layernorm", "layernorm"), ("tie_word_embeddings", True),
        ("ffn_config", None, {"ffn_type": "mptmlp"}), ("fc_type", "torch", {"name": "torch"}),
    )  # fmt: skip
    for key, *allowed in held:
        keys.only(key, *allowed)
    keys.ignore("transformers' MPT has no learned positions whatever it says", "learned_pos_emb")
    keys.ignore(
        "it steers LLM-Foundry, not the model",
        *("init_device", "init_config", "verbose", "tokenizer_name", "auto_map", "use_pad_tok_in_ffn"),
    )
    eps = keys.take("layer_norm_epsilon", 1e-5)
    keys.only("norm_eps", eps)
    return {
        "family": "mpt",
        "layers": keys.take("n_layers", 24),
        "hidden": keys.take("d_model", 2048),
        "heads": keys.take("n_heads", 16),
        "vocab_size": keys.take("vocab_size", 50368),
        "max_seq_len": keys.take("max_seq_len", 2048),
        "norm_eps": eps,
        "dropout": dropout,
        "init_std": keys.take("initializer_range", 0.02),
    }


def _write(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["MptForCausalLM"],
        "n_layers": spec.layers,
        "d_model": spec.hidden,
        "n_heads": spec.heads,
        "expansion_ratio": 4,
        "vocab_size": spec.vocab_size,
        "max_seq_len": spec.max_seq_len,
        "layer_norm_epsilon": spec.norm_eps,
        "learned_pos_emb": False,
        "no_bias": True,
        # Dropout is left out: transformers 5 accepts only whole numbers for attn_pdrop.
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch"},
        "tie_word_embeddings": True,
        "initializer_range": spec.init_std,
    }


def _table(spec: ModelSpec) -> Iterator[Entry]:
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


MPT = Family(
    "mpt",
    DEFAULTS,
    PRESETS,
    formats={"mpt": HfFormat(_read, _write)},
    model_type=lambda spec: "mpt",
    table=_table,
    stored=StoredNames(prefix="transformer.", copies={"lm_head.weight": "transformer.wte.weight"}),
)

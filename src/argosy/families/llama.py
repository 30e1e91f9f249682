"""Llama and models built like it: Mistral, Qwen3, and their mixtures of experts (see `experts.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from argosy.config.model import ModelSpec
from argosy.families.experts import (
    experts_table,
    read_mixtral,
    read_qwen3_moe,
    write_mixtral,
    write_qwen3_moe,
)
from argosy.families.family import Family, HfFormat, Row, StoredNames, Tree
from argosy.families.gated import attention_table, gated_mlp_table, read_gated, write_gated
from argosy.families.hf_keys import Keys
from argosy.families.weight_table import Entry

DEFAULTS: Row = {
    "architecture": "decoder", "positions": "rope", "norm": "rmsnorm", "norm_bias": False, "norm_eps": 1e-5,
    "activation": "swiglu", "attention_bias": False, "mlp_bias": False, "tied": False,
}  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Row:
    row = {"family": "llama", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return row | {"vocab_size": 32000, "max_seq_len": 4096} | more


def _llama3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Row:
    return _llama(
        layers, hidden, heads, 8, ffn, vocab_size=128256, max_seq_len=8192, rope_theta=500_000.0, tied=tied
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Row:
    return _llama(
        layers, hidden, heads, kv_heads, ffn, head_dim=128, vocab_size=151936, max_seq_len=32768,
        rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True, **more,
    )  # fmt: skip


PRESETS: dict[str, Row] = {
    "llama2-7b": _llama(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672),
    "llama3-1b": _llama3(16, 2048, 32, 8192, tied=True),
    "llama3-3b": _llama3(28, 3072, 24, 8192, tied=True),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, max_seq_len=8192, window=4096),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14336, max_seq_len=32768, rope_theta=1_000_000.0,
        moe={"experts": 8, "top_k": 2, "ffn": 14336},
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, moe={"experts": 128, "top_k": 8, "ffn": 768, "balance_loss": 0.001}),
    # DeepSeek-MoE's shape: fine-grained experts, two shared, a dense first layer; plain multi-head attention.
    "deepseek-moe-16b": _llama(
        28, 2048, 16, 16, 10944, vocab_size=102400, norm_eps=1e-6,
        moe={
            "experts": 64, "top_k": 6, "ffn": 1408, "shared_experts": 2, "dense_layers": 1, "norm_topk": False,
            "balance_loss": 0.001,
        },
    ),
    # A small mixture of eight for benchmarks, named by its counts: 3.55 B parameters, 1.14 B of them active.
    "moe-3.5b-a1.1b": _llama(16, 2048, 16, 8, 4096, moe={"experts": 8, "top_k": 2, "ffn": 4096}),
}  # fmt: skip


def _read_llama(keys: Keys) -> Tree:
    keys.ignore("SmolLM's name for its own class", "is_llama_config")
    # SmolLM's; transformers reads neither key.
    keys.only("rope_interleaved", False)
    return read_gated(keys, kv_heads=None, head_dim=None, max_seq_len=2048) | {
        "attention_bias": keys.take("attention_bias", False),
        "mlp_bias": keys.take("mlp_bias", False),
    }


def _write_llama(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["LlamaForCausalLM"],
        **write_gated(spec),
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
    }


def _read_mistral(keys: Keys) -> Tree:
    common = read_gated(keys, kv_heads=8, head_dim=None, max_seq_len=131072, ffn=14336)
    return common | {"window": keys.take("sliding_window", 4096, null=True)}


def _write_mistral(spec: ModelSpec) -> Tree:
    return {"architectures": ["MistralForCausalLM"], **write_gated(spec), "sliding_window": spec.window}


def _read_qwen3(keys: Keys) -> Tree:
    common = read_gated(keys, kv_heads=32, head_dim=128, max_seq_len=32768, vocab=151936, ffn=22016)
    return common | {
        "qk_norm": True,
        "attention_bias": keys.take("attention_bias", False),
        "window": _qwen_window(keys, common["layers"]),
    }


def _write_qwen3(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **write_gated(spec),
        "attention_bias": spec.attention_bias,
        "use_sliding_window": spec.window is not None,
        "sliding_window": spec.window,
        "max_window_layers": 0 if spec.window is not None else spec.layers,
        "layer_types": [_LAYER_TYPES[spec.window is not None]] * spec.layers,
    }


_LAYER_TYPES = {False: "full_attention", True: "sliding_attention"}


def _qwen_window(keys: Keys, layers: int) -> int | None:
    """Return Qwen's window, or None. Theirs may cover some of the layers; ours covers all or none."""
    on, window = keys.take("use_sliding_window", False), keys.take("sliding_window", 4096, null=True)
    first = keys.count("max_window_layers", 28)
    by_rule = [_LAYER_TYPES[bool(on and window and i >= first)] for i in range(layers)]
    kinds = keys.listing("layer_types") or by_rule
    if len(kinds) != layers or len(set(map(str, kinds))) > 1 or kinds[0] not in _LAYER_TYPES.values():
        key, value = ("max_window_layers", first) if kinds is by_rule else ("layer_types", kinds)
        raise keys.refuse(key, value, f"all {layers} layers must be one of {', '.join(_LAYER_TYPES.values())}")
    if kinds[0] == _LAYER_TYPES[False]:
        return None
    if not (on and window):
        raise keys.refuse("layer_types", kinds, f"use_sliding_window is {on!r} and sliding_window {window!r}")
    return keys.count("sliding_window", 4096)


def _table(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield from attention_table(spec, f"{ours}.attn", f"{theirs}.self_attn")
        if spec.moe is None or i < spec.moe.dense_layers:
            yield from gated_mlp_table(spec, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            yield from experts_table(spec, spec.moe, f"{ours}.mlp", theirs)
        yield Entry(f"{ours}.attn_norm.weight", (f"{theirs}.input_layernorm.weight",))
        yield Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    yield Entry("norm.weight", ("model.norm.weight",))
    if not spec.tied:
        yield Entry("head.weight", ("lm_head.weight",))


def _model_type(spec: ModelSpec) -> str:
    if spec.moe is not None:
        return "qwen3_moe" if spec.qk_norm else "mixtral"
    if spec.qk_norm:
        return "qwen3"
    return "mistral" if spec.window is not None else "llama"


LLAMA = Family(
    "llama",
    DEFAULTS,
    PRESETS,
    formats={
        "llama": HfFormat(_read_llama, _write_llama),
        "mistral": HfFormat(_read_mistral, _write_mistral),
        "qwen3": HfFormat(_read_qwen3, _write_qwen3),
        "mixtral": HfFormat(read_mixtral, write_mixtral),
        "qwen3_moe": HfFormat(read_qwen3_moe, write_qwen3_moe),
    },
    model_type=_model_type,
    table=_table,
    stored=StoredNames(
        prefix="model.",
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        unused=r"rotary_emb\.inv_freq$",
    ),
)

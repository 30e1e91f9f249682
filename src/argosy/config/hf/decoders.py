"""The decoders: gpt2, llama, mistral, qwen3, mpt. Each has a reader, from their keys to ours, and a writer back."""

from __future__ import annotations

from typing import Any

from argosy.config.hf.keys import Keys
from argosy.config.hf.rope import read_rope, write_rope
from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError

Tree = dict[str, Any]

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_ACTIVATION_NAMES = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


def activation_name(spec: ModelSpec) -> str:
    """Their word for the activation of an MLP without a gate."""
    if spec.activation not in _ACTIVATION_NAMES:
        raise ArgosyError(
            "hf.unsupported",
            f"in Hugging Face's class for the family {spec.family} the MLP has no gate",
            key="model.activation",
            value=spec.activation,
            fix=f"only a model with {' or '.join(_ACTIVATION_NAMES)} can be exported",
        )
    return _ACTIVATION_NAMES[spec.activation]


def read_gpt2(keys: Keys) -> Tree:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.ignore("it changes the rounding of attention scores only", "reorder_and_upcast_attn")
    keys.ignore("an older name of n_positions, which transformers does not read", "n_ctx")
    keys.ignore(
        "it is of GPT2DoubleHeadsModel's second head",
        *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
    )
    return {
        "family": "gpt",
        "layers": keys.take("n_layer", 12),
        "hidden": keys.take("n_embd", 768),
        "heads": keys.take("n_head", 12),
        "ffn": keys.take("n_inner", None),
        "vocab_size": keys.take("vocab_size", 50257),
        "max_seq_len": keys.take("n_positions", 1024),
        "activation": keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_eps": keys.take("layer_norm_epsilon", 1e-5),
        "tied": keys.take("tie_word_embeddings", True),
        "dropout": keys.same("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
        "init_std": keys.take("initializer_range", 0.02),
    }


def write_gpt2(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": spec.layers,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_seq_len,
        "activation_function": activation_name(spec),
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), spec.dropout),
        "initializer_range": spec.init_std,
    }


def read_llama(keys: Keys) -> Tree:
    keys.ignore("SmolLM's name for its own class", "is_llama_config")
    keys.only("rope_interleaved", False)  # SmolLM; transformers reads neither
    return read_gated(keys, kv_heads=None, head_dim=None, max_seq_len=2048) | {
        "attention_bias": keys.take("attention_bias", False),
        "mlp_bias": keys.take("mlp_bias", False),
    }


def write_llama(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["LlamaForCausalLM"],
        **write_gated(spec),
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
    }


def read_mistral(keys: Keys) -> Tree:
    common = read_gated(keys, kv_heads=8, head_dim=None, max_seq_len=131072, ffn=14336)
    return common | {"window": keys.take("sliding_window", 4096, null=True)}


def write_mistral(spec: ModelSpec) -> Tree:
    return {"architectures": ["MistralForCausalLM"], **write_gated(spec), "sliding_window": spec.window}


def read_qwen3(keys: Keys) -> Tree:
    common = read_gated(keys, kv_heads=32, head_dim=128, max_seq_len=32768, vocab=151936, ffn=22016)
    return common | {
        "qk_norm": True,
        "attention_bias": keys.take("attention_bias", False),
        "window": _qwen_window(keys, common["layers"]),
    }


def write_qwen3(spec: ModelSpec) -> Tree:
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
    """Their window may cover some of the layers; ours covers all or none."""
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


def read_gated(
    keys: Keys,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    max_seq_len: int,
    vocab: int = 32000,
    ffn: int = 11008,
    eps: float = 1e-6,
    layers: int = 32,
    hidden: int = 4096,
    theta: float = 10_000.0,
) -> Tree:
    """What llama and its relatives share; the arguments are the defaults of their config classes."""
    keys.only("hidden_act", "silu")
    keys.only("attention_dropout", 0.0)
    longest = keys.take("max_position_embeddings", max_seq_len)
    return {
        "family": "llama",
        "layers": keys.count("num_hidden_layers", layers),
        "hidden": keys.take("hidden_size", hidden),
        "heads": keys.take("num_attention_heads", 32),
        "kv_heads": keys.take("num_key_value_heads", kv_heads, null=True),
        "head_dim": keys.take("head_dim", head_dim),
        "ffn": keys.take("intermediate_size", ffn),
        "vocab_size": keys.take("vocab_size", vocab),
        "max_seq_len": longest,
        "norm_eps": keys.take("rms_norm_eps", eps),
        "tied": keys.take("tie_word_embeddings", False),
        "init_std": keys.take("initializer_range", 0.02),
        **read_rope(keys, theta=theta, max_seq_len=longest),
    }


def write_gated(spec: ModelSpec) -> Tree:
    return {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        **write_rope(spec),
    }


def read_mpt(keys: Keys) -> Tree:
    attention = keys.section("attn_config")
    held: tuple[tuple[Any, ...], ...] = (
        ("attn_type", "multihead_attention"), ("alibi", True), ("alibi_bias_max", 8), ("clip_qkv", None),
        ("softmax_scale", None), ("prefix_lm", False), ("qk_ln", False), ("attn_uses_sequence_id", False),
        ("rope", False), ("sliding_window_size", -1), ("fused_qkv", True), ("nope", False), ("qk_gn", False),  # and below: as LLM-Foundry writes them
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


def write_mpt(spec: ModelSpec) -> Tree:
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
        # No dropout: transformers 5 takes only whole numbers for attn_pdrop.
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch"},
        "tie_word_embeddings": True,
        "initializer_range": spec.init_std,
    }

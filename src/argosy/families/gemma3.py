"""Gemma 3, the text models.

Five of six layers have a sliding window and their own rope base. Attention and MLP have norms on both sides, whose weights are
offsets from one. Queries and keys are normalised. Token vectors are scaled by sqrt(hidden).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from argosy.config.model import ModelSpec
from argosy.families.architecture import plan_layers
from argosy.families.family import Family, HfFormat, Row, StoredNames, Tree
from argosy.families.gated import attention_table, gated_mlp_table, write_sizes
from argosy.families.hf_keys import Keys
from argosy.families.hf_rope import ROPE_KEYS, read_scaling, write_scaling
from argosy.families.weight_table import Entry

GLOBAL_EVERY = 6
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
DEFAULTS: Row = {
    "architecture": "decoder", "positions": "rope", "norm": "rmsnorm", "norm_bias": False, "norm_eps": 1e-6,
    "norm_centred": True, "activation": "geglu", "attention_bias": False, "mlp_bias": False, "tied": True, "qk_norm": True,
    "embed_scale": True, "window": 1024, "global_every": GLOBAL_EVERY, "rope_theta": 1_000_000.0,
    "local_rope_theta": 10_000.0,
}  # fmt: skip


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Row:
    row = {"family": "gemma3", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return row | {"head_dim": 256, "vocab_size": 262144, "max_seq_len": 32768, "query_pre_attn_scalar": 256} | more


PRESETS: dict[str, Row] = {
    "gemma3-270m": _gemma3(18, 640, 4, 1, 2048, window=512),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, window=512),
}


def _read(keys: Keys) -> Row:
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("attention_dropout", 0.0)
    keys.only("attn_logit_softcapping", None)
    keys.only("final_logit_softcapping", None)
    keys.only("use_bidirectional_attention", False, None)
    keys.ignore("it chooses how transformers keeps keys and values while it generates", "cache_implementation")
    layers = keys.depth("num_hidden_layers", 26)
    return {
        "family": "gemma3",
        "layers": layers,
        "hidden": keys.take("hidden_size", 2304),
        "heads": keys.take("num_attention_heads", 8),
        "kv_heads": keys.take("num_key_value_heads", 4),
        "head_dim": keys.take("head_dim", 256),
        "ffn": keys.take("intermediate_size", 9216),
        "vocab_size": keys.take("vocab_size", 262208),
        "max_seq_len": keys.take("max_position_embeddings", 131072),
        "norm_eps": keys.take("rms_norm_eps", 1e-6),
        "attention_bias": keys.take("attention_bias", False),
        "tied": keys.take("tie_word_embeddings", True),
        "init_std": keys.take("initializer_range", 0.02),
        "query_pre_attn_scalar": keys.take("query_pre_attn_scalar", 256),
        "window": keys.take("sliding_window", 4096),
        "global_every": _read_pattern(keys, layers),
        **_read_rope(keys),
    }


def _read_pattern(keys: Keys, layers: int) -> int:
    """Return n, where every n-th layer is global. `layer_types` takes precedence over the number in older files."""
    # Only files without layer_types need the number.
    least = None if (kinds := keys.listing("layer_types")) else 1
    pattern = keys.count("_sliding_window_pattern", GLOBAL_EVERY, least=least)
    pattern = keys.count("sliding_window_pattern", pattern, least=least)
    kinds = kinds or _layer_types(pattern, layers)
    first_global = kinds.index(_GLOBAL) + 1 if _GLOBAL in kinds else layers + 1
    for every in (pattern, first_global):
        if every > 0 and kinds == _layer_types(every, layers):
            return every
    raise keys.refuse(
        "layer_types", kinds, f"Argosy has {_GLOBAL} in every n-th of {layers} layers, {_LOCAL} in the others"
    )


def _layer_types(every: int, layers: int) -> list[str]:
    return [_LOCAL if (i + 1) % every else _GLOBAL for i in range(layers)]


def _read_rope(keys: Keys) -> Row:
    """Read the rope settings of global and local layers.

    Older files have `rope_theta`, `rope_local_base_freq` and `rope_scaling`. transformers 5 writes both kinds of layers into
    `rope_parameters`. Scaling applies to the global layers only.
    """
    theta, local_theta = keys.take("rope_theta", 1_000_000.0), keys.take("rope_local_base_freq", 10_000.0)
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    everywhere, local = new.section(_GLOBAL), new.section(_LOCAL)
    stretched = old if keys.take("rope_scaling", None) else everywhere
    (everywhere if stretched is old else old).ignore("transformers, too, lets the older form win", *ROPE_KEYS)
    found = {
        "rope_theta": everywhere.take("rope_theta", stretched.take("rope_theta", theta)),
        "local_rope_theta": local.take("rope_theta", local_theta),
        "rope_scaling": read_scaling(stretched, keys.count("max_position_embeddings", 131072)),
    }
    local.only("rope_type", "default")
    for section in (old, everywhere, local):
        section.only("partial_rotary_factor", 1.0, None)
        section.finish()
    new.finish()
    return found


def _write(spec: ModelSpec) -> Tree:
    scaling, every = write_scaling(spec), spec.global_every or spec.layers + 1
    local_theta = spec.local_rope_theta or spec.rope_theta
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **write_sizes(spec),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "attention_bias": spec.attention_bias,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        "query_pre_attn_scalar": spec.query_pre_attn_scalar or spec.head_dim,
        "sliding_window": spec.window,
        "sliding_window_pattern": every,
        "layer_types": _layer_types(every, spec.layers),
        "rope_theta": spec.rope_theta,
        "rope_local_base_freq": local_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            _GLOBAL: {"rope_theta": spec.rope_theta} | (scaling or {"rope_type": "default"}),
            _LOCAL: {"rope_theta": local_theta, "rope_type": "default"},
        },
    }


def _table(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield from attention_table(spec, f"{ours}.attn", f"{theirs}.self_attn")
        yield from gated_mlp_table(spec, f"{ours}.mlp", f"{theirs}.mlp")
        for norm, name in (
            ("attn_norm", "input"), ("attn_post_norm", "post_attention"),
            ("mlp_norm", "pre_feedforward"), ("mlp_post_norm", "post_feedforward"),
        ):  # fmt: skip
            yield Entry(f"{ours}.{norm}.weight", (f"{theirs}.{name}_layernorm.weight",))
    yield Entry("norm.weight", ("model.norm.weight",))
    if not spec.tied:
        yield Entry("head.weight", ("lm_head.weight",))


GEMMA3 = Family(
    "gemma3",
    DEFAULTS,
    PRESETS,
    formats={"gemma3_text": HfFormat(_read, _write)},
    model_type=lambda spec: "gemma3_text",
    table=_table,
    stored=StoredNames(prefix="model.", copies={"lm_head.weight": "model.embed_tokens.weight"}),
    plan=partial(plan_layers, norms="sandwich"),
)

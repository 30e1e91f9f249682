"""The common part of Llama and its relatives: their config.json keys, and the names of their attention and gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.families.family import Tree
from argosy.families.hf_keys import Keys
from argosy.families.hf_rope import read_rope, write_rope
from argosy.families.weight_table import Entry, QueryKeyValue


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
    """Read the config.json keys that llama and its relatives share. The arguments are the defaults of their config classes."""
    keys.only("hidden_act", "silu")
    keys.only("attention_dropout", 0.0)
    longest = keys.take("max_position_embeddings", max_seq_len)
    return {
        "family": "llama",
        "layers": keys.depth("num_hidden_layers", layers),
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


def write_sizes(spec: ModelSpec) -> Tree:
    """Return the sizes of a decoder under the names that Llama and its relatives share."""
    return {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
    }


def write_gated(spec: ModelSpec) -> Tree:
    return {
        **write_sizes(spec),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        **write_rope(spec),
    }


def attention_table(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    for kind in ("weight", "bias") if spec.attention_bias else ("weight",):
        qkv = tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv")
        yield Entry(f"{ours}.qkv.{kind}", qkv, QueryKeyValue.of(spec))
        yield Entry(f"{ours}.out.{kind}", (f"{theirs}.o_proj.{kind}",))
    if spec.qk_norm:
        yield Entry(f"{ours}.q_norm.weight", (f"{theirs}.q_norm.weight",))
        yield Entry(f"{ours}.k_norm.weight", (f"{theirs}.k_norm.weight",))


def gated_mlp_table(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    for kind in ("weight", "bias") if spec.mlp_bias else ("weight",):
        for name in ("gate", "up", "down"):
            yield Entry(f"{ours}.{name}.{kind}", (f"{theirs}.{name}_proj.{kind}",))

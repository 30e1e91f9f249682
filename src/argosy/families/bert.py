"""BERT, and the two-tower retriever built on it.

Hugging Face's class is BertForPreTraining, or BertForMaskedLM if the model does not classify pairs. Every layer has a bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from argosy.config.model import ModelSpec
from argosy.families.architecture import plan_layers
from argosy.families.family import Family, HfFormat, Row, StoredNames, Tree
from argosy.families.hf_keys import ACTIVATIONS, Keys, activation_name
from argosy.families.weight_table import SAME, Entry, Layout, QueryKeyValue, Twice

_WITH_PAIRS, _WITHOUT = "BertForPreTraining", "BertForMaskedLM"
# Google's Chinese and multilingual models have the settings of a pooler that no code implements.
_OLD_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")

DEFAULTS: Row = {
    "architecture": "encoder", "positions": "learned", "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-12,
    "activation": "gelu", "attention_bias": True, "mlp_bias": True, "tied": True, "type_vocab_size": 2,
    "pair": "nsp", "dropout": 0.1,
}  # fmt: skip


def _bert(layers: int, hidden: int, heads: int) -> Row:
    return {
        "family": "bert", "layers": layers, "hidden": hidden, "heads": heads, "vocab_size": 30522, "max_seq_len": 512,
    }  # fmt: skip


PRESETS: dict[str, Row] = {
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    # Retrieval by the inverse cloze task, as in ORQA: two BERT towers, vectors of 128.
    "ict-base": _bert(12, 768, 12) | {"pair": "none", "retrieval": {"projection": 128}},
    "ict-large": _bert(24, 1024, 16) | {"pair": "none", "retrieval": {"projection": 128}},
}


def _read(keys: Keys) -> Tree:
    keys.only("position_embedding_type", "absolute")
    keys.only("directionality", "bidi")
    keys.ignore("no code has that pooler", *(f"pooler_{name}" for name in _OLD_POOLER))
    return {
        "family": "bert",
        "layers": keys.take("num_hidden_layers", 12),
        "hidden": keys.take("hidden_size", 768),
        "heads": keys.take("num_attention_heads", 12),
        "ffn": keys.take("intermediate_size", 3072),
        "vocab_size": keys.take("vocab_size", 30522),
        "max_seq_len": keys.take("max_position_embeddings", 512),
        "type_vocab_size": keys.take("type_vocab_size", 2),
        "pair": "nsp" if _WITH_PAIRS in keys.listing("architectures") else "none",
        "activation": keys.choice("hidden_act", ACTIVATIONS, "gelu"),
        "norm_eps": keys.take("layer_norm_eps", 1e-12),
        "tied": keys.take("tie_word_embeddings", True),
        "dropout": keys.same("hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1),
        "init_std": keys.take("initializer_range", 0.02),
    }


def _write(spec: ModelSpec) -> Tree:
    return {
        "architectures": [_WITH_PAIRS if spec.judges_pairs else _WITHOUT],
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "type_vocab_size": spec.type_vocab_size,
        "hidden_act": activation_name(spec),
        "layer_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "hidden_dropout_prob": spec.dropout,
        "attention_probs_dropout_prob": spec.dropout,
        "initializer_range": spec.init_std,
    }


def _table(spec: ModelSpec) -> Iterator[Entry]:
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("types", "token_type")):
        yield Entry(f"encoder.embed.{ours}.weight", (f"bert.embeddings.{theirs}_embeddings.weight",))
    yield from _both("encoder.embed.norm", "bert.embeddings.LayerNorm")
    for i in range(spec.layers):
        yield from _block(spec, f"encoder.layers.{i}", f"bert.encoder.layer.{i}")
    # An untied head has its own bias; the other is unused.
    own = (
        "cls.predictions.decoder.bias",
        "cls.predictions.bias",
    )
    yield Entry("head.bias", own[1:]) if spec.tied else Entry("head.bias", own, Twice())
    yield from _both("head.transform", "cls.predictions.transform.dense")
    yield from _both("head.norm", "cls.predictions.transform.LayerNorm")
    if not spec.tied:
        yield Entry("output.weight", ("cls.predictions.decoder.weight",))
    if spec.judges_pairs:
        yield from _both("pair.pooler", "bert.pooler.dense")
        yield from _both("pair.classifier", "cls.seq_relationship")


def _block(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    qkv = tuple(f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))
    yield from _both(f"{ours}.attn.qkv", *qkv, layout=QueryKeyValue.of(spec))
    yield from _both(f"{ours}.attn.out", f"{theirs}.attention.output.dense")
    yield from _both(f"{ours}.attn_norm", f"{theirs}.attention.output.LayerNorm")
    yield from _both(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
    yield from _both(f"{ours}.mlp.down", f"{theirs}.output.dense")
    yield from _both(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")


def _both(ours: str, *theirs: str, layout: Layout = SAME) -> Iterator[Entry]:
    """Yield the entries of a layer's weight and bias."""
    for kind in ("weight", "bias"):
        yield Entry(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), layout)


BERT = Family(
    "bert",
    DEFAULTS,
    PRESETS,
    formats={"bert": HfFormat(_read, _write)},
    model_type=lambda spec: "bert",
    table=_table,
    stored=StoredNames(
        prefix="bert.",
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        # transformers 4 shares one bias, even with an untied head, and stores it under one of the names.
        left_out={
            "cls.predictions.decoder.bias": "cls.predictions.bias",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
        },
        # The heads of a model that does not classify pairs.
        unused=r"embeddings\.position_ids$|^cls\.seq_relationship\.|^bert\.pooler\.",
        renamed={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
    ),
    plan=partial(plan_layers, norms="post"),
)

"""BERT as BertForPreTraining, or as BertForMaskedLM where the model judges no pairs; everything has a bias."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.model.hf.table import SAME, Entry, Layout, QueryKeyValue, Twice


def bert(spec: ModelSpec) -> Iterator[Entry]:
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("types", "token_type")):
        yield Entry(f"encoder.embed.{ours}.weight", (f"bert.embeddings.{theirs}_embeddings.weight",))
    yield from _both("encoder.embed.norm", "bert.embeddings.LayerNorm")
    for i in range(spec.layers):
        yield from _block(spec, f"encoder.layers.{i}", f"bert.encoder.layer.{i}")
    own = (
        "cls.predictions.decoder.bias",
        "cls.predictions.bias",
    )  # a head of its own has its bias; the other is unused
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
    """Weight and bias."""
    for kind in ("weight", "bias"):
        yield Entry(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), layout)

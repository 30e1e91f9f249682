"""Which table a model's weights have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from argosy.config.model import ModelSpec
from argosy.model.hf.bert import bert
from argosy.model.hf.gpt2 import gpt2
from argosy.model.hf.llama import llama
from argosy.model.hf.mpt import mpt
from argosy.model.hf.t5 import t5
from argosy.model.hf.table import Entry

_TABLES: dict[str, Callable[[ModelSpec], Iterator[Entry]]] = {
    "gpt": gpt2,
    "llama": llama,
    "mpt": mpt,
    "bert": bert,
    "t5": t5,
}


def entries(spec: ModelSpec) -> list[Entry]:
    """The table of a model: every one of our parameters, in the order of the model."""
    return list(_TABLES[spec.family](spec))

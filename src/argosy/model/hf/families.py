"""Which table a model's weights have, and what else its files may hold: names of older versions, copies of tied
weights, and buffers that are no weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from argosy.config.model import ModelSpec
from argosy.model.hf.bert import bert
from argosy.model.hf.gpt2 import gpt2
from argosy.model.hf.llama import llama
from argosy.model.hf.mpt import mpt
from argosy.model.hf.t5 import t5
from argosy.model.hf.table import Entry


@dataclass(frozen=True)
class Family:
    """`prefix` is left out of the names where the model was saved without its head. `copies` are tensors that must equal
    another, and are written by nobody. `unused` are those a model may do without. `left_out` are stored only where they
    differ from another."""

    table: Callable[[ModelSpec], Iterator[Entry]]
    prefix: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    unused: str = r"(?!)"
    left_out: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def name_of(self, stored: str, known: Collection[str]) -> str:
        """The name that the table has for a tensor of a file."""
        for pattern, name in self.renamed.items():
            stored = re.sub(pattern, name, stored)
        return f"{self.prefix}{stored}" if stored not in known and f"{self.prefix}{stored}" in known else stored

    def may_lack(self, name: str) -> bool:
        return re.search(self.unused, name) is not None


_FAMILIES: dict[str, Family] = {
    "gpt": Family(
        gpt2,
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        unused=r"h\.\d+\.attn\.(bias|masked_bias)$",  # the causal mask
    ),
    "llama": Family(
        llama,
        prefix="model.",
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        unused=r"rotary_emb\.inv_freq$",
    ),
    "mpt": Family(mpt, prefix="transformer.", copies={"lm_head.weight": "transformer.wte.weight"}),
    "bert": Family(
        bert,
        prefix="bert.",
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        left_out={  # transformers 4 has one for both, also with a head of its own, and stores it under one of the names
            "cls.predictions.decoder.bias": "cls.predictions.bias",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
        },
        unused=r"embeddings\.position_ids$|^cls\.seq_relationship\.|^bert\.pooler\.",  # heads of a model without pairs
        renamed={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
    ),
    "t5": Family(
        t5,
        copies={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        left_out={"lm_head.weight": "shared.weight"},  # transformers 5 begins with one for both, also in version 1.1
        # Version 1.0 stores a bias for cross attention that its own code never reads.
        unused=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    ),
}


def family_of(spec: ModelSpec) -> Family:
    return _FAMILIES[spec.family]


def entries(spec: ModelSpec) -> list[Entry]:
    """The table of a model: every one of our parameters, in the order of the model."""
    return list(family_of(spec).table(spec))

"""The language of the weight tables: an `Entry` is one of our parameters, the tensors of theirs it is made of, and the
layout between them.

These are declarations. `argosy.checkpoint.hf.hf_convert` moves the numbers, one parameter at a time, so that no model has to fit
in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.model import ModelSpec


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""


@dataclass(frozen=True)
class Transposed:
    """One matrix stored as [in, out], as GPT-2's Conv1D has it."""


@dataclass(frozen=True)
class Twice:
    """One tensor under two names, of which the first is the one that is computed with."""


@dataclass(frozen=True)
class Stacked:
    """Many tensors of one shape, one for each expert; ours has them along a new first dimension."""


@dataclass(frozen=True)
class QueryKeyValue:
    """Rows (of a matrix or a bias) of all queries, all keys, all values: apart in three tensors, or `fused` in one, which
    may be stored `transposed`. Ours is one, group by group: for each key/value head its queries, its key, its value."""

    heads: int
    kv_heads: int
    head_dim: int
    fused: bool = False
    transposed: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, *, fused: bool = False, transposed: bool = False) -> QueryKeyValue:
        return cls(spec.heads, spec.kv_heads, spec.head_dim, fused, transposed)

    @property
    def rows(self) -> list[int]:
        """Rows of the queries, of the keys and of the values."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


@dataclass(frozen=True)
class KeyValue:
    """Rows of all keys and rows of all values, apart; ours is one, for each head its key and its value."""

    heads: int


Layout = Same | Transposed | Twice | Stacked | QueryKeyValue | KeyValue
SAME, TRANSPOSED = Same(), Transposed()


@dataclass(frozen=True)
class Entry:
    """One of our parameters and where it is in theirs."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME

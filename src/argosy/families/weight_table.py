"""The vocabulary of the weight tables: an `Entry` names one of our parameters, their tensors it is made of, and the layout.

These are declarations. `argosy.checkpoint.hf.hf_convert` converts the tensors one parameter at a time, so that the model does
not have to fit in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.model import ModelSpec


@dataclass(frozen=True)
class Same:
    """One tensor, stored unchanged."""


@dataclass(frozen=True)
class Transposed:
    """One matrix stored as [in, out], as in GPT-2's Conv1D."""


@dataclass(frozen=True)
class Twice:
    """One tensor stored under two names. The model computes with the first."""


@dataclass(frozen=True)
class Stacked:
    """Many tensors of one shape, one per expert. Ours stacks them along a new first dimension."""


@dataclass(frozen=True)
class QueryKeyValue:
    """The rows, of a matrix or a bias, of all queries, all keys and all values.

    Theirs are three tensors, or one if `fused`, which may be stored `transposed`. Ours is one tensor, group by group: for each
    KV head its queries, its key, its value.
    """

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
        """The number of rows of the queries, of the keys and of the values."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


@dataclass(frozen=True)
class KeyValue:
    """The rows of all keys and of all values, in two tensors. Ours is one tensor: for each head its key and its value."""

    heads: int


Layout = Same | Transposed | Twice | Stacked | QueryKeyValue | KeyValue
SAME, TRANSPOSED = Same(), Transposed()


@dataclass(frozen=True)
class Entry:
    """One of our parameters, and their tensors it is made of."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME

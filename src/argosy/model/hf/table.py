"""The language of the weight tables: an `Entry` is one of our parameters, the tensors of theirs it is made of, and the
layout between them.

Entries are independent of each other: a converter goes through a table and holds one parameter at a time. A layout only
moves numbers, so it works on tensors without data as well (device "meta"), which is how shapes are known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from argosy.config.model import ModelSpec

Weights = dict[str, Tensor]


class Layout(Protocol):
    """How their tensors become ours and ours theirs: `split(join(parts))` gives the parts again."""

    def join(self, parts: Sequence[Tensor]) -> Tensor: ...

    def split(self, whole: Tensor) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        return [whole]


@dataclass(frozen=True)
class Transposed:
    """One matrix stored as [in, out], as GPT-2's Conv1D has it."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part.t()

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        return [whole.t()]


SAME, TRANSPOSED = Same(), Transposed()


@dataclass(frozen=True)
class Twice:
    """One tensor under two names, of which the first is the one that is computed with."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        return [whole, whole.clone()]


@dataclass(frozen=True)
class Stacked:
    """Many tensors of one shape, one for each expert; ours has them along a new first dimension."""

    inner: Layout = SAME

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([self.inner.join([part]) for part in parts])

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        return [part for one in whole.unbind() for part in self.inner.split(one)]


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

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([part.t() if self.transposed else part for part in parts])
        grouped = [torch.unflatten(rows, 0, (self.kv_heads, -1)) for rows in torch.split(whole, self._sizes())]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        groups = torch.unflatten(whole, 0, (self.kv_heads, -1))
        within = [self.heads // self.kv_heads * self.head_dim, self.head_dim, self.head_dim]
        parts = [rows.flatten(0, 1) for rows in torch.split(groups, within, dim=1)]
        if self.fused:
            parts = [torch.cat(parts)]
        return [part.t() if self.transposed else part for part in parts]

    def _sizes(self) -> list[int]:
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


@dataclass(frozen=True)
class KeyValue:
    """Rows of all keys and rows of all values, apart; ours is one, for each head its key and its value."""

    heads: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([torch.unflatten(part, 0, (self.heads, -1)) for part in parts], dim=1).flatten(0, 1)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in torch.unflatten(whole, 0, (self.heads, -1)).chunk(2, dim=1)]


@dataclass(frozen=True)
class Entry:
    """One of our parameters and where it is in theirs."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME

    def to_ours(self, theirs: Mapping[str, Tensor]) -> Tensor:
        """A missing tensor is a KeyError that names it."""
        return self.layout.join([theirs[name] for name in self.theirs]).contiguous()

    def to_theirs(self, ours: Tensor) -> Weights:
        parts = self.layout.split(ours)
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}


def from_hf(table: Iterable[Entry], weights: Mapping[str, Tensor]) -> Weights:
    """Our whole state dict from theirs."""
    return {entry.ours: entry.to_ours(weights) for entry in table}


def to_hf(table: Iterable[Entry], weights: Mapping[str, Tensor]) -> Weights:
    """Their whole state dict from ours; a tied head is left out, as it is where they save it."""
    return {name: part for entry in table for name, part in entry.to_theirs(weights[entry.ours]).items()}

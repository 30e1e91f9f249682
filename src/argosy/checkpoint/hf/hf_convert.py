"""Conversion between our parameters and Hugging Face's tensors, as the weight tables of `argosy.families` declare it.

Entries are independent: a converter walks a table and holds one parameter at a time. A layout only moves numbers, so it also works on
tensors without data (device "meta"). This gives the shapes in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from argosy.config.model import ModelSpec
from argosy.families.family_registry import family_of
from argosy.families.weight_table import Entry, KeyValue, Layout, QueryKeyValue, Same, Stacked, Transposed, Twice

Weights = dict[str, Tensor]


def entries(spec: ModelSpec) -> list[Entry]:
    """Return the weight table of a model: all our parameters, in model order."""
    return list(family_of(spec).table(spec))


def to_ours(entry: Entry, theirs: Mapping[str, Tensor]) -> Tensor:
    """Return our parameter of an entry. A missing tensor raises a KeyError that names it."""
    return _join(entry.layout, [theirs[name] for name in entry.theirs]).contiguous()


def to_theirs(entry: Entry, ours: Tensor) -> Weights:
    """Return Hugging Face's tensors of an entry, by name."""
    parts = _split(entry.layout, ours)
    return {name: part.contiguous() for name, part in zip(entry.theirs, parts, strict=True)}


def from_hf(table: Iterable[Entry], weights: Mapping[str, Tensor]) -> Weights:
    """Return our whole state dict, converted from Hugging Face's."""
    return {entry.ours: to_ours(entry, weights) for entry in table}


def to_hf(table: Iterable[Entry], weights: Mapping[str, Tensor]) -> Weights:
    """Return Hugging Face's whole state dict, converted from ours. A tied head is left out, as in their own files."""
    return {name: part for entry in table for name, part in to_theirs(entry, weights[entry.ours]).items()}


def _join(layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """Return our tensor from Hugging Face's parts. `_split` is the inverse."""
    match layout:
        case Same() | Twice():
            return parts[0]
        case Transposed():
            return parts[0].t()
        case Stacked():
            return torch.stack(list(parts))
        case QueryKeyValue():
            whole = torch.cat([part.t() if layout.transposed else part for part in parts])
            grouped = [torch.unflatten(rows, 0, (layout.kv_heads, -1)) for rows in torch.split(whole, layout.rows)]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        case KeyValue():
            return torch.cat([torch.unflatten(part, 0, (layout.heads, -1)) for part in parts], dim=1).flatten(0, 1)
    assert_never(layout)


def _split(layout: Layout, whole: Tensor) -> Sequence[Tensor]:
    match layout:
        case Same():
            return [whole]
        case Twice():
            return [whole, whole.clone()]
        case Transposed():
            return [whole.t()]
        case Stacked():
            return whole.unbind()
        case QueryKeyValue():
            groups = torch.unflatten(whole, 0, (layout.kv_heads, -1))
            within = [layout.heads // layout.kv_heads * layout.head_dim, layout.head_dim, layout.head_dim]
            rows = [part.flatten(0, 1) for part in torch.split(groups, within, dim=1)]
            parts = [torch.cat(rows)] if layout.fused else rows
            return [part.t() if layout.transposed else part for part in parts]
        case KeyValue():
            return [part.flatten(0, 1) for part in torch.unflatten(whole, 0, (layout.heads, -1)).chunk(2, dim=1)]
    assert_never(layout)

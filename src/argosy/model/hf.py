"""Weights in Hugging Face's names and layouts, both ways, for the decoders Argosy builds.

Each of our parameters is made from one or three of theirs: `gpt2` keeps matrices transposed and query, key, value side
by side; `llama`, `mistral` and `qwen3` keep the three apart; `mpt` stacks them. Ours is one matrix, group by group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.config.model import ModelSpec

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class _Entry:
    """One of our parameters and where it is in theirs."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False  # gpt2's Conv1D stores [in, out]
    fused: bool = False  # query, key and value rows, to be regrouped


def from_hf(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Weights:
    """Our state dict from theirs. A missing tensor is a KeyError that names it."""
    ours: Weights = {}
    for entry in _entries(spec):
        parts = [weights[name] for name in entry.theirs]
        if entry.transposed:
            parts = [part.t() for part in parts]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        ours[entry.ours] = (_group(spec, whole) if entry.fused else whole).contiguous()
    return ours


def to_hf(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Weights:
    """Their state dict from ours; a tied head is left out, as it is where they save it."""
    theirs: Weights = {}
    for entry in _entries(spec):
        whole = _ungroup(spec, weights[entry.ours]) if entry.fused else weights[entry.ours]
        if len(entry.theirs) == 3:
            sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
            parts = list(torch.split(whole, sizes))
        else:
            parts = [whole]
        for name, part in zip(entry.theirs, parts, strict=True):
            theirs[name] = (part.t() if entry.transposed else part).contiguous()
    return theirs


def _group(spec: ModelSpec, rows: Tensor) -> Tensor:
    """[all queries, all keys, all values] -> for each key/value head: its queries, its key, its value."""
    q, k, v = torch.split(
        rows, [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    )
    parts = [torch.unflatten(part, 0, (spec.kv_heads, -1)) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _ungroup(spec: ModelSpec, rows: Tensor) -> Tensor:
    group = spec.heads // spec.kv_heads * spec.head_dim
    heads = torch.unflatten(rows, 0, (spec.kv_heads, -1))
    parts = torch.split(heads, [group, spec.head_dim, spec.head_dim], dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _entries(spec: ModelSpec) -> Iterator[_Entry]:
    yield from {"gpt": _gpt2, "llama": _llama, "mpt": _mpt}[spec.family](spec)


def _gpt2(spec: ModelSpec) -> Iterator[_Entry]:
    yield _Entry("embed.tokens.weight", ("transformer.wte.weight",))
    yield _Entry("embed.positions.weight", ("transformer.wpe.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        for mine, yours, fused in (
            ("attn.qkv", "attn.c_attn", True),
            ("attn.out", "attn.c_proj", False),
            ("mlp.up", "mlp.c_fc", False),
            ("mlp.down", "mlp.c_proj", False),
        ):
            yield _Entry(f"{ours}.{mine}.weight", (f"{theirs}.{yours}.weight",), transposed=True, fused=fused)
            yield _Entry(f"{ours}.{mine}.bias", (f"{theirs}.{yours}.bias",), fused=fused)
        for mine, yours in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
            yield _Entry(f"{ours}.{mine}.weight", (f"{theirs}.{yours}.weight",))
            yield _Entry(f"{ours}.{mine}.bias", (f"{theirs}.{yours}.bias",))
    yield _Entry("norm.weight", ("transformer.ln_f.weight",))
    yield _Entry("norm.bias", ("transformer.ln_f.bias",))
    if not spec.tied:
        yield _Entry("head.weight", ("lm_head.weight",))


def _llama(spec: ModelSpec) -> Iterator[_Entry]:
    yield _Entry("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
        yield _Entry(f"{ours}.attn.qkv.weight", qkv, fused=True)
        yield _Entry(f"{ours}.attn.out.weight", (f"{theirs}.self_attn.o_proj.weight",))
        if spec.qk_norm:
            yield _Entry(f"{ours}.attn.q_norm.weight", (f"{theirs}.self_attn.q_norm.weight",))
            yield _Entry(f"{ours}.attn.k_norm.weight", (f"{theirs}.self_attn.k_norm.weight",))
        for name in ("gate", "up", "down"):
            yield _Entry(f"{ours}.mlp.{name}.weight", (f"{theirs}.mlp.{name}_proj.weight",))
        yield _Entry(f"{ours}.attn_norm.weight", (f"{theirs}.input_layernorm.weight",))
        yield _Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    yield _Entry("norm.weight", ("model.norm.weight",))
    if not spec.tied:
        yield _Entry("head.weight", ("lm_head.weight",))


def _mpt(spec: ModelSpec) -> Iterator[_Entry]:
    yield _Entry("embed.tokens.weight", ("transformer.wte.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"transformer.blocks.{i}"
        yield _Entry(f"{ours}.attn.qkv.weight", (f"{theirs}.attn.Wqkv.weight",), fused=True)
        yield _Entry(f"{ours}.attn.out.weight", (f"{theirs}.attn.out_proj.weight",))
        yield _Entry(f"{ours}.mlp.up.weight", (f"{theirs}.ffn.up_proj.weight",))
        yield _Entry(f"{ours}.mlp.down.weight", (f"{theirs}.ffn.down_proj.weight",))
        yield _Entry(f"{ours}.attn_norm.weight", (f"{theirs}.norm_1.weight",))
        yield _Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.norm_2.weight",))
    yield _Entry("norm.weight", ("transformer.norm_f.weight",))

"""The mapping of parameters to slices of tensors in a Megatron checkpoint.

Megatron's QKV matrix has the same group-by-group order as ours, so no row is permuted. Two things vary between checkpoints.
Layers are stacked along a first axis (`decoder.layers.mlp…`) or separate (`decoder.layers.3.mlp…`), and so are experts. Gate
and up are halves of one matrix, or two matrices with the endings `_w` and `_v`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.checkpoint.megatron.torch_dist import TorchDist
from argosy.checkpoint.tensors import TensorInfo
from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.model.build import build_model
from argosy.parallel.shards import Box

EMBEDDING = "embedding.word_embeddings.weight"
_ENDS = {
    "embed.tokens.": "embedding.word_embeddings.",
    "embed.positions.": "embedding.position_embeddings.",
    "norm.": "decoder.final_layernorm.",
    "head.": "output_layer.",
}
# Names in a layer. Transformer Engine fuses a norm with the linear layer after it, and names the norm after that layer.
_LAYER = {
    "attn_norm.": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "attn.qkv.": ("self_attention.linear_qkv.",),
    "attn.out.": ("self_attention.linear_proj.",),
    "attn.q_norm.": ("self_attention.q_layernorm.",),
    "attn.k_norm.": ("self_attention.k_layernorm.",),
    "mlp_norm.": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.router.bias": ("mlp.router.expert_bias",),
    "mlp.router.": ("mlp.router.",),
    "mlp.experts.gate": ("mlp.experts.experts.linear_fc1.weight",),
    "mlp.experts.up": ("mlp.experts.experts.linear_fc1.weight",),
    "mlp.experts.down": ("mlp.experts.experts.linear_fc2.weight",),
    "mlp.shared_gate.weight": ("mlp.shared_experts.gate_weight",),
    "mlp.shared.gate.": ("mlp.shared_experts.linear_fc1.",),
    "mlp.shared.up.": ("mlp.shared_experts.linear_fc1.",),
    "mlp.shared.down.": ("mlp.shared_experts.linear_fc2.",),
    "mlp.gate.": ("mlp.linear_fc1.",),
    "mlp.up.": ("mlp.linear_fc1.",),
    "mlp.down.": ("mlp.linear_fc2.",),
}
# Gate and up are halves of Megatron's linear_fc1.
_HALVES = {
    "mlp.gate.": 0, "mlp.up.": 1, "mlp.shared.gate.": 0, "mlp.shared.up.": 1, "mlp.experts.gate": 0, "mlp.experts.up": 1,
}  # fmt: skip
# Tensors that are no weights: optimiser state, counters, fp8 scales.
_NO_WEIGHT = re.compile(r"^(chained_\d+\.)?optimizer\.|_extra_state(/|$)|\.local_tokens_per_expert$")


class Piece(NamedTuple):
    """A slice of a Megatron tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Part:
    """One of our parameters: its type and shape, and the slices it is made of."""

    ours: str
    info: TensorInfo
    pieces: list[Piece]

    def read(self, source: TorchDist) -> Tensor:
        if len(self.pieces) == 1:
            return source.read_box(*self.pieces[0]).view(self.info.shape)
        whole = torch.empty(self.info.shape, dtype=self.info.dtype)
        for place, piece in zip(whole, self.pieces, strict=True):
            place.copy_(source.read_box(*piece).view(place.shape))
        return whole


def make_table(spec: ModelSpec, stored: Mapping[str, TensorInfo], where: str) -> dict[str, Part]:
    """Return the slices of each parameter, by our name, in the model's order.

    Raises:
        ArgosyError: a tensor is missing, is left over, or has another shape.
    """
    if not architecture_of(spec).causal or spec.positions not in ("learned", "rope"):
        raise _unsupported(
            where, f"a {spec.architecture} with {spec.positions} positions is not among Megatron's GPT models"
        )
    finder = _Finder(spec, stored, where)
    table = {}
    for name, parameter in build_model(spec, "meta").named_parameters():
        pieces = list(finder.pieces(name, tuple(parameter.shape)))
        kinds = {stored[piece.name].dtype for piece in pieces}
        if len(kinds) > 1 or not all(kind.is_floating_point for kind in kinds):
            raise _bad(
                where, f"{pieces[0].name} and its like are of the types {sorted(map(str, kinds))}", "save it again"
            )
        if pieces:
            table[name] = Part(name, TensorInfo(kinds.pop(), tuple(parameter.shape)), pieces)
    finder.require_all()
    return table


class _Finder:
    def __init__(self, spec: ModelSpec, stored: Mapping[str, TensorInfo], where: str) -> None:
        self.spec, self.stored, self.where = spec, stored, where
        self.used: set[str] = set()
        self.missing: list[str] = []
        candidates = [name for name in stored if name.endswith(EMBEDDING) and not _NO_WEIGHT.search(name)]
        if len(candidates) != 1:
            raise _bad(
                where,
                f"it holds {len(candidates)} tensors {EMBEDDING}, and a GPT model has one",
                "import another checkpoint",
            )
        # NeMo's prefix is "module.".
        self.prefix = candidates[0].removesuffix(EMBEDDING)
        self.stacked = f"{self.prefix}decoder.layers.self_attention.linear_proj.weight" in stored

    def pieces(self, ours: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        if not ours.startswith("layers."):
            start = next(start for start in _ENDS if ours.startswith(start))
            yield from self._piece(f"{self.prefix}{_ENDS[start]}{ours.removeprefix(start)}", (), shape)
            return
        _, layer, inner = ours.split(".", 2)
        start = next(start for start in _LAYER if inner.startswith(start))
        names = [self._in_layer(int(layer), theirs + inner.removeprefix(start)) for theirs in _LAYER[start]]
        name = next((one for one in names if one in self.stored), names[0])
        lead = (int(layer),) if self.stacked else ()
        half = _HALVES.get(start) if self.spec.gated else None
        if start.startswith("mlp.experts."):
            yield from self._experts(name, lead, shape, half)
        else:
            yield from self._half(name, lead, shape, half, axis=0)

    def _in_layer(self, layer: int, name: str) -> str:
        return f"{self.prefix}decoder.layers.{'' if self.stacked else f'{layer}.'}{name}"

    def _experts(self, name: str, lead: tuple[int, ...], shape: tuple[int, ...], half: int | None) -> Iterator[Piece]:
        """Yield the slices of the experts: of one stacked tensor, or of one tensor for each expert."""
        apart = [name.replace(".experts.experts.", f".experts.experts.{expert}.") for expert in range(shape[0])]
        if name in self.stored or not any(one in self.stored or f"{one}_w" in self.stored for one in apart):
            yield from self._half(name, lead, shape, half, axis=1)
            return
        for one in apart:
            yield from self._half(one, lead, shape[1:], half, axis=0)

    def _half(
        self, name: str, lead: tuple[int, ...], shape: tuple[int, ...], half: int | None, *, axis: int
    ) -> Iterator[Piece]:
        """Yield a whole tensor, or the gate (`half` 0) or up (1) half of it along `axis`."""
        if half is not None and name not in self.stored and f"{name}_w" in self.stored:
            name, half = f"{name}_{'wv'[half]}", None
        yield from self._piece(name, lead, shape, half=half, axis=axis)

    def _piece(
        self, name: str, lead: tuple[int, ...], shape: tuple[int, ...], half: int | None = None, axis: int = 0
    ) -> Iterator[Piece]:
        if name not in self.stored:
            self.missing.append(name)
            return
        self.used.add(name)
        offset, full = [0] * len(shape), list(shape)
        if half is not None:
            offset[axis], full[axis] = half * shape[axis], 2 * shape[axis]
        self._require_shape(name, tuple([self.spec.layers] * len(lead) + full))
        yield Piece(name, Box((*lead, *offset), (*[1] * len(lead), *shape)))

    def _require_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        found = self.stored[name].shape
        padded = name.removeprefix(self.prefix) in (EMBEDDING, "output_layer.weight")
        if found == wanted or (padded and found[1:] == wanted[1:] and found[0] > wanted[0]):
            return
        raise _bad(
            self.where,
            f"{name} has shape {list(found)}, and the model wants {list(wanted)}{_arithmetic(name, self.spec)}",
            "give the model as it was trained: --model PRESET, and KEY=VALUE for what differs from it",
        )

    def require_all(self) -> None:
        if self.missing:
            raise _bad(
                self.where,
                f"it lacks {_some(self.missing)}, which the model has",
                "check the model (layers, biases, norms, tied, moe), or copy the checkpoint again",
            )
        left = [name for name in self.stored if name not in self.used and not _NO_WEIGHT.search(name)]
        if left:
            raise _bad(
                self.where,
                f"it holds {_some(left)}, which the model does not have",
                "check the model (layers, biases, norms, tied, moe); a model with other parts cannot be imported",
            )


def _arithmetic(name: str, spec: ModelSpec) -> str:
    """Return the arithmetic behind the expected shape, for the error message."""
    facts = [f"layers = {spec.layers}, hidden = {spec.hidden}"]
    if "linear_qkv" in name or "linear_proj" in name:
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        facts.append(f"(heads {spec.heads} + 2 x kv_heads {spec.kv_heads}) x head_dim {spec.head_dim} = {rows}")
        facts.append(f"heads x head_dim = {spec.heads * spec.head_dim}")
    elif "linear_fc" in name:
        ffn = spec.moe.ffn if spec.moe is not None and "experts" in name else spec.ffn
        facts.append(f"2 x ffn {ffn} = {2 * ffn}" if spec.gated else f"ffn = {ffn}")
    elif "embeddings" in name or "output_layer" in name:
        facts.append(f"vocab_size = {spec.vocab_size}, max_seq_len = {spec.max_seq_len}")
    return f" ({'; '.join(facts)})"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")


def _bad(where: str, why: str, fix: str) -> ArgosyError:
    return ArgosyError("megatron.bad-files", f"{where}: {why}", fix=fix)


def _unsupported(where: str, why: str) -> ArgosyError:
    return ArgosyError("megatron.unsupported", f"{where}: {why}", fix="import a GPT, Llama or Mixtral model")

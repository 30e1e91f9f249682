"""Which parameters of a model are cut, along which dimension, and where activations enter and leave the cut part.

The tables name parameters by the class they belong to, so that one serves every model there is. Column-parallel and
row-parallel layers are a pair of cuts with one entrance and one exit around both: attention, MLP, experts. The output
projections add no bias of their own (the residual sum does), so that the sum over ranks never counts one twice.

Everything that is not cut is whole on every rank. Some of that sees only a part of what
it is multiplied with (a share of the tokens, some of the heads), and so has a part of its gradient: the engine has these
summed over the ranks, once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.config.checks import FP8_ALIGNMENT
from argosy.model.decoder import Decoder
from argosy.model.dropout import Dropout
from argosy.model.encoder import Encoder, MaskedLM, TokenHead
from argosy.model.encoder_decoder import EncoderDecoder, Stack
from argosy.model.layers import MLP, Attention, AttentionBlock, Block, CrossAttention, Embedding, Linear
from argosy.model.moe import Experts, MoE, Report
from argosy.model.retriever import Tower
from argosy.parallel.cutting import cut_parameters
from argosy.parallel.replicas import sum_gradients
from argosy.parallel.tensor.region import Region
from argosy.parallel.tensor.vocabulary import SpreadOutput, look_up

# The dimension each is cut along. The rows of qkv and kv lie head by head, so that equal parts are whole heads.
CUT: dict[type[nn.Module], dict[str, int]] = {
    Attention: {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1},
    CrossAttention: {"q.weight": 0, "q.bias": 0, "kv.weight": 0, "kv.bias": 0, "out.weight": 1},
    MLP: {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1},
    Experts: {"gate": 1, "up": 1, "down": 2},
    Embedding: {"tokens.weight": 0},
    Stack: {"relative.weight": 1},
    TokenHead: {"bias": 0},
    Decoder: {"head.weight": 0},
    EncoderDecoder: {"head.weight": 0},
    MaskedLM: {"output.weight": 0},
}
_NORM = ("weight", "bias")
_BLOCK_NORMS = ("attn_norm", "attn_post_norm", "cross_norm", "mlp_norm", "mlp_post_norm")
# Whole parameters inside the cut part, where each rank has some heads or a part of every expert.
INSIDE: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: tuple(f"{norm}.{name}" for norm in ("q_norm", "k_norm") for name in _NORM),
    MoE: ("router.weight", "shared_gate.weight"),
}
# Those outside of it, where with sequence parallelism each rank has some tokens.
OUTSIDE: dict[type[nn.Module], tuple[str, ...]] = {
    AttentionBlock: (
        *(f"{norm}.{name}" for norm in _BLOCK_NORMS for name in _NORM),
        "attn.out.bias",
        "cross.out.bias",
    ),
    Block: ("mlp.down.bias",),
    Embedding: ("positions.weight", "types.weight", "norm.weight", "norm.bias"),
    Decoder: ("norm.weight", "norm.bias"),
    Stack: ("norm.weight", "norm.bias"),
}


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Over the ranks of a mesh of one axis; with `sequence`, what is not cut is spread by tokens."""
    region = Region(mesh.get_group(), sequence)
    for module in list(model.modules()):
        _connect(module, region)
    cuts: dict[nn.Module, dict[str, int]] = {}
    for module in model.modules():
        for cls, dims in CUT.items():
            for path, dim in dims.items() if isinstance(module, cls) else ():
                if (found := _find(module, path)) is not None:
                    cuts.setdefault(found[0], {})[found[1]] = dim
    for owner, named in cuts.items():
        cut_parameters(owner, named, mesh)
        if isinstance(owner, Linear):
            owner.fp8 = owner.fp8 and all(size % FP8_ALIGNMENT == 0 for size in owner.weight.shape)


def sum_partial_gradients(model: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype, *, sequence: bool) -> None:
    """After a step's last backward pass: sum what is whole on every rank, but saw only a part."""
    sum_gradients(list(partial_parameters(model, sequence=sequence)), group, dtype)


def partial_parameters(model: nn.Module, *, sequence: bool) -> Iterator[nn.Parameter]:
    """Those whose gradients are parts of a sum over the ranks."""
    for module in model.modules():
        for table in (INSIDE, OUTSIDE) if sequence else (INSIDE,):
            for cls, paths in table.items():
                for path in paths if isinstance(module, cls) else ():
                    if (found := _find(module, path)) is not None:
                        yield getattr(*found)


def _connect(module: nn.Module, region: Region) -> None:
    """Entrances and exits, and what else of a module has to know of its part."""
    match module:
        case AttentionBlock():
            for name in ("attn", "cross", "mlp"):
                inner = getattr(module, name, None)
                if isinstance(inner, MoE):
                    inner.register_forward_pre_hook(partial(_enter_experts, region))
                    inner.register_forward_hook(partial(_leave_experts, region))
                elif inner is not None:
                    inner.register_forward_pre_hook(partial(_first_argument, region.enter))
                    inner.register_forward_hook(partial(_result, region.leave))
        case Embedding():
            module.tokens.forward = partial(look_up, module.tokens, region)  # type: ignore[method-assign]
            for table in (module.positions, module.types):
                if table is not None and region.sequence:
                    table.register_forward_pre_hook(partial(_first_argument, partial(region.tokens.take, dim=-1)))
        case Dropout():
            module.share = region.tokens
        case Decoder() | EncoderDecoder():
            module.predict = SpreadOutput(module.spec.vocab_size, region, alike=False)
        case MaskedLM():  # its heads see all tokens, alike on every rank
            module.together.register_forward_hook(partial(_result, region.end))
            module.predict = SpreadOutput(module.spec.vocab_size, region, alike=True)
        case Tower():
            module.together.register_forward_hook(partial(_result, region.end))
        case Stack() if not module.decoder:  # what it makes is read inside every layer of the decoder
            module.together.register_forward_hook(partial(_result, region.enter))
    if isinstance(module, (Decoder, Encoder, Stack)):
        module.heads = region.share


def _first_argument(function: Callable[[Tensor], Tensor], module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    return function(arguments[0]), *arguments[1:]


def _result(function: Callable[[Tensor], Tensor], module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return function(result)


def _enter_experts(region: Region, module: nn.Module, arguments: tuple[Tensor, Tensor | None]) -> Any:
    """All that is computed there gives each rank a part of the gradient, and so must the router's own losses, which all ranks
    compute alike."""
    x, scale = arguments
    return region.enter(x), None if scale is None else scale / region.ranks


def _leave_experts(region: Region, module: nn.Module, arguments: Any, result: tuple[Tensor, Report]) -> Any:
    y, report = result
    return region.leave(y), report


def _find(module: nn.Module, path: str) -> tuple[nn.Module, str] | None:
    """The module that has the parameter, and its name there; None where the model has no such part."""
    *outer, name = path.split(".")
    for part in outer:
        if (child := getattr(module, part, None)) is None:
            return None
        module = child
    return (module, name) if module._parameters.get(name) is not None else None

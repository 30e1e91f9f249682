"""Tensor parallelism applied to a model: shards its parameters as its modules declare, and hooks the collectives around them.

Column-parallel and row-parallel layers come in pairs with one entry and one exit around both: attention, MLP, experts. The output
projections add no bias of their own (the residual sum does), so that the sum over ranks never counts a bias twice.

Everything else is whole on every rank. Some of these parameters see only a part of their inputs (a share of the tokens, some of
the heads), and so get a part of their gradient: the engine sums these gradients over the ranks, once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.config.fp8_rules import fits_fp8
from argosy.errors import ArgosyError
from argosy.model.decoder import Decoder
from argosy.model.encoder import Encoder, MaskedLM, TokenHead
from argosy.model.encoder_decoder import EncoderDecoder, Stack
from argosy.model.layers import AttentionBlock, Embedding, Linear
from argosy.model.moe import MoE, Report
from argosy.model.retriever import Tower
from argosy.model.sharding import ROW, Declaration, Dropout, Sharding
from argosy.parallel.cutting import cut_parameters
from argosy.parallel.tensor.region import Region, summed
from argosy.parallel.tensor.vocabulary import SpreadOutput, look_up

# The parts of a block with collectives around them.
_REGIONS = ("attn", "cross", "mlp")
# Modules outside of these parts whose cut parameters `_connect` serves.
_CONNECTED = (AttentionBlock, Embedding, Decoder, EncoderDecoder, MaskedLM, TokenHead, Stack)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Shard a model over the ranks of a mesh of one axis. With `sequence`, the residual stream is spread by tokens."""
    region = Region(mesh.get_group(), sequence)
    declared = declared_shardings(model)
    _require_regions(model)
    for module in list(model.modules()):
        _connect(module, region)
    cuts: dict[nn.Module, dict[str, int]] = {}
    for name, sharding in declared.items():
        if sharding.dim is not None:
            path, _, parameter = name.rpartition(".")
            cuts.setdefault(model.get_submodule(path), {})[parameter] = sharding.dim
    for owner, named in cuts.items():
        cut_parameters(owner, named, mesh)
        if isinstance(owner, Linear):
            if named.get("weight") == ROW.dim:
                owner.sum_inputs = partial(summed, group=region.group)
            owner.fp8 = owner.fp8 and fits_fp8(*owner.weight.shape)


def partial_parameters(model: nn.Module, *, sequence: bool) -> list[nn.Parameter]:
    """Return the parameters that are whole on every rank but get only a part of their gradient. After a step's last backward
    pass these gradients have to be summed over the ranks."""
    when = ("always", "sequence") if sequence else ("always",)
    parameters = dict(model.named_parameters())
    return [parameters[name] for name, sharding in declared_shardings(model).items() if sharding.partial in when]


def declared_shardings(model: nn.Module) -> dict[str, Sharding]:
    """Return the sharding that the modules of a model declare for each parameter, by name. Raise ArgosyError if one has none."""
    found: dict[str, Sharding] = {}
    for path, module in model.named_modules():
        declaration: Declaration = getattr(module, "tensor_parallel", {})
        for name, sharding in declaration.items():
            found |= dict.fromkeys(_parameters_of(module, path, name), sharding)
    undeclared = [name for name, _ in model.named_parameters() if name not in found]
    if undeclared:
        owner = type(model.get_submodule(undeclared[0].rpartition(".")[0])).__name__
        raise ArgosyError(
            "model.undeclared",
            f"no module declares how {', '.join(undeclared)} ({owner}) may be sharded; with parallel.tp > 1 a gradient that ranks "
            "have in parts would not be summed",
            key="parallel.tp",
            fix="name it in `tensor_parallel` of its class or of the class around it (argosy.model.sharding), or parallel.tp=1",
        )
    return found


def _parameters_of(module: nn.Module, path: str, name: str) -> Iterator[str]:
    """Yield the full names of the parameters that the module at `path` declares as `name`, as far as the model has them."""
    *outer, last = name.split(".")
    owner: nn.Module | None = module
    for part in outer:
        owner = None if owner is None else owner._modules.get(part)
    if owner is None:
        return
    start = ".".join(filter(None, (path, name)))
    if owner._parameters.get(last) is not None:
        yield start
    elif (child := owner._modules.get(last)) is not None:
        yield from (f"{start}.{inner}" for inner, _ in child.named_parameters())


def _require_regions(model: nn.Module) -> None:
    """Raise ArgosyError if a module has parameters cut over ranks or used inside a region, and no collectives are put around it."""
    blocks = [module for module in model.modules() if isinstance(module, AttentionBlock)]
    inside = {part for block in blocks for inner in _regions(block) for part in inner.modules()}
    for path, module in model.named_modules():
        declaration: Declaration = getattr(module, "tensor_parallel", {})
        named = [name for name, one in declaration.items() if one.dim is not None or one.partial == "always"]
        cut = [name for name in named if any(_parameters_of(module, path, name))]
        if cut and module not in inside and not isinstance(module, _CONNECTED):
            raise ArgosyError(
                "model.undeclared",
                f"{path} ({type(module).__name__}) declares that {', '.join(cut)} may be cut over ranks, and nothing sums its "
                f"results: it is not the {', '.join(_REGIONS)} of a block",
                key="parallel.tp",
                fix="declare its parameters OUTSIDE or REPLICATED (argosy.model.sharding), or connect it in "
                "argosy.parallel.tensor.apply",
            )


def _regions(block: AttentionBlock) -> Iterator[nn.Module]:
    """Yield the parts of a block that compute with some of the heads or a part of the inner width."""
    yield from (inner for name in _REGIONS if (inner := getattr(block, name, None)) is not None)


def _connect(module: nn.Module, region: Region) -> None:
    """Hook the collectives into a module, and set its share of heads, tokens or vocabulary."""
    match module:
        case AttentionBlock():
            # The sum over ranks comes first.
            module.fuses_sums = False
            for inner in _regions(module):
                if isinstance(inner, MoE):
                    inner.register_forward_pre_hook(partial(_enter_experts, region))
                    inner.register_forward_hook(partial(_leave_experts, region))
                else:
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
            module.predict = SpreadOutput(module.spec, region, alike=False, fp8=module.predict.fp8)
        # The heads of a masked LM see all tokens, the same on every rank.
        case MaskedLM():
            module.together.register_forward_hook(partial(_result, region.end))
            module.predict = SpreadOutput(module.spec, region, alike=True, fp8=module.predict.fp8)
        case Tower():
            module.together.register_forward_hook(partial(_result, region.end))
        # Every decoder layer reads the encoder's output inside its sharded part.
        case Stack() if not module.decoder:
            module.together.register_forward_hook(partial(_result, region.enter))
    if isinstance(module, (Decoder, Encoder, Stack)):
        module.heads = region.share


def _first_argument(function: Callable[[Tensor], Tensor], module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    return function(arguments[0]), *arguments[1:]


def _result(function: Callable[[Tensor], Tensor], module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return function(result)


def _enter_experts(region: Region, module: nn.Module, arguments: tuple[Tensor, Tensor | None]) -> Any:
    """Enter a MoE layer. Each rank gets a part of the gradient there. All ranks compute the same router losses, so these are
    divided by the number of ranks."""
    x, scale = arguments
    # The router and the experts read x.
    return region.enter(x, read_once=False), None if scale is None else scale / region.ranks


def _leave_experts(region: Region, module: nn.Module, arguments: Any, result: tuple[Tensor, Report]) -> Any:
    y, report = result
    return region.leave(y), report

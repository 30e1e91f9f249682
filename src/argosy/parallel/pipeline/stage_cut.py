"""The division of a model into pipeline stages: a stage is the model without the modules of other stages.

The modules that stay keep their names and places, so that weights, optimiser and checkpoints see no difference. The first stage
has the embedding, the last one the output. Tied weights are in both. Weights that all layers of a stack share are in every stage
that has one of these layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from argosy.config.model import ModelSpec
from argosy.config.schema import ParallelSpec
from argosy.config.stage_layers import rank_of_stage, split_layers
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of

_Children = dict[str, nn.Module | None]


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: `modules[s]` are the modules of stage s, on pipeline rank `ranks[s]`."""

    modules: tuple[frozenset[str], ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def modules_of_rank(self, rank: int) -> frozenset[str]:
        return frozenset().union(*(self.modules[stage] for stage in self.of_rank(rank)))

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Return the modules that several ranks hold, and these ranks in the order of their stages."""
        held: dict[str, dict[int, None]] = {}
        for modules, rank in zip(self.modules, self.ranks, strict=True):
            for module in sorted(modules):
                held.setdefault(module, {})[rank] = None
        return {module: tuple(ranks) for module, ranks in held.items() if len(ranks) > 1}


def cut_stages(model: ModelSpec, parallel: ParallelSpec, seq_len: int) -> Stages:
    """Return the pipeline stages of a layout."""
    anatomy = architecture_of(model).modules(model)
    count = parallel.pp * parallel.vpp
    stages = []
    for stage, layers in enumerate(split_layers(model, count, seq_len)):
        blocks = [anatomy.blocks[layer] for layer in layers]
        modules = {*blocks, *(module for block in blocks for module in anatomy.beside.get(block, ()))}
        modules |= set(anatomy.begin if stage == 0 else ()) | set(anatomy.end if stage == count - 1 else ())
        stages.append(frozenset(modules))
    return Stages(tuple(stages), tuple(rank_of_stage(parallel.schedule, parallel.pp, s) for s in range(count)))


def keep_stages(model: nn.Module, stages: Stages, rank: int) -> None:
    """Remove the modules that only other pipeline ranks hold. The forward pass then takes the number of one of this rank's
    stages, and computes that stage alone."""
    _require_held(model, frozenset().union(*stages.modules))
    for module, children in _kept_children(model, stages.modules_of_rank(rank)):
        module._modules = children
    model.forward = StageForward(model, {stage: stages.modules[stage] for stage in stages.of_rank(rank)})


class StageForward:
    """The forward pass of a model, restricted to the modules of one stage."""

    def __init__(self, model: nn.Module, modules: Mapping[int, frozenset[str]]) -> None:
        self._model, self._modules, self._forward = model, modules, model.forward
        # By stage. Filled at the first pass of a stage, after all other changes to the model.
        self._children: dict[int, list[tuple[nn.Module, _Children]]] = {}

    def __call__(self, *inputs: Any, stage: int, **named: Any) -> Any:
        if len(self._modules) == 1:
            return self._forward(*inputs, **named)
        if stage not in self._children:
            self._children[stage] = list(_kept_children(self._model, self._modules[stage]))
        before = [(module, module._modules) for module, _ in self._children[stage]]
        try:
            for module, children in self._children[stage]:
                module._modules = children
            return self._forward(*inputs, **named)
        finally:
            for module, whole in before:
                module._modules = whole


def _kept_children(module: nn.Module, kept: Iterable[str], path: str = "") -> Iterator[tuple[nn.Module, _Children]]:
    """Yield each module that may lose children, with the children it keeps. Modules named in `kept` and modules without weights
    stay; the others become None, or are removed from their ModuleDict."""
    kept, left = set(kept), _Children()
    for name, child in module._modules.items():
        where = f"{path}{name}"
        inside = any(other.startswith(f"{where}.") for other in kept)
        if child is None or where in kept or inside or not any(True for _ in child.parameters()):
            left[name] = child
            if child is not None and inside and where not in kept:
                yield from _kept_children(child, kept, f"{where}.")
        elif not isinstance(module, nn.ModuleDict):
            left[name] = None
    yield module, left


def _require_held(model: nn.Module, held: frozenset[str]) -> None:
    """Refuse a model with parameters that no stage holds."""
    lost = [name for name, _ in model.named_parameters() if not any(name.startswith(f"{module}.") for module in held)]
    if lost:
        raise ArgosyError(
            "model.undeclared",
            f"no pipeline stage holds {', '.join(lost)}",
            key="parallel.pp",
            fix="name the module in argosy/families/architecture.py, or parallel.pp=1",
        )

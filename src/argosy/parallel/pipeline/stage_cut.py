"""The parts of a model that a rank holds: a stage is the model with everything that is elsewhere taken out.

What stays keeps its name and its place, so that weights, optimiser and checkpoints never see the difference. The first stage
has the embedding, the last one the output; tied weights are in both, and what all layers of a stack share is in every stage
that has one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from argosy.config.model import ModelSpec
from argosy.config.schema import ParallelSpec
from argosy.config.stage_layers import rank_of_stage, split_layers
from argosy.families.architecture import architecture_of


@dataclass(frozen=True)
class Stages:
    """`modules[s]` are those of stage s, on pipeline rank `ranks[s]`."""

    modules: tuple[frozenset[str], ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def modules_of_rank(self, rank: int) -> frozenset[str]:
        return frozenset().union(*(self.modules[stage] for stage in self.of_rank(rank)))

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Modules that several ranks hold, and who they are, in the order of their stages."""
        held: dict[str, dict[int, None]] = {}
        for modules, rank in zip(self.modules, self.ranks, strict=True):
            for module in sorted(modules):
                held.setdefault(module, {})[rank] = None
        return {module: tuple(ranks) for module, ranks in held.items() if len(ranks) > 1}


def cut(model: ModelSpec, parallel: ParallelSpec, seq_len: int) -> Stages:
    """The stages of a layout."""
    anatomy = architecture_of(model).modules(model)
    count = parallel.pp * parallel.vpp
    stages = []
    for stage, layers in enumerate(split_layers(model, count, seq_len)):
        blocks = [anatomy.blocks[layer] for layer in layers]
        modules = {*blocks, *(module for block in blocks for module in anatomy.beside.get(block, ()))}
        modules |= set(anatomy.begin if stage == 0 else ()) | set(anatomy.end if stage == count - 1 else ())
        stages.append(frozenset(modules))
    return Stages(tuple(stages), tuple(rank_of_stage(parallel.schedule, parallel.pp, s) for s in range(count)))


def part_of(module: nn.Module, kept: Iterable[str], path: str = "") -> nn.Module:
    """The same module with only the modules named, and those without weights, in it. What it keeps is shared with the whole,
    and so is everything that was done to the module itself."""
    kept = set(kept)
    part = object.__new__(type(module))  # whatever the class asks for when it is built was asked already
    part.__dict__.update(module.__dict__)
    part._modules = {}
    for name, child in module._modules.items():
        where = f"{path}{name}"
        if child is None or where in kept or not any(True for _ in child.parameters()):
            part._modules[name] = child
        elif any(other.startswith(f"{where}.") for other in kept):
            part._modules[name] = part_of(child, kept, f"{where}.")
        elif not isinstance(module, nn.ModuleDict):
            part._modules[name] = None
    return part

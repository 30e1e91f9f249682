"""The weights of a checkpoint with adapters: merged, as everything that uses a finished model wants them, or apart.

A checkpoint of such a run has the frozen weights too, in the precision of training, and optimiser state of the adapters only. So it
needs nothing beside it to be resumed, sampled from or exported, on any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from argosy.checkpoint.stored import StoredTensors
from argosy.checkpoint.tensors import TensorInfo
from argosy.config.model import LoraSpec, ModelSpec
from argosy.config.start import stored_description
from argosy.families.adapter_sizes import MAGNITUDE, is_adapter


@dataclass(frozen=True)
class Readable:
    """Tensors by name: their types and shapes, and the function that reads one."""

    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]


def merged_weights(weights: StoredTensors, root: Path) -> Readable:
    """Return the weights of a checkpoint of the run in `root`, with adapters added to the weights they belong to."""
    infos = {name: info for name, info in weights.infos.items() if not is_adapter(name)}
    lora = stored_lora(root) if len(infos) < len(weights.infos) else None
    if lora is None:
        return Readable(weights.infos, weights.__getitem__)

    def read(name: str) -> Tensor:
        from argosy.model.ops.low_rank import merged

        layer = name.removesuffix(".weight")
        if f"{layer}.lora_a" not in weights.infos:
            return weights[name]
        a, b = weights[f"{layer}.lora_a"], weights[f"{layer}.lora_b"]
        return merged(weights[name], a, b, lora.scale, weights[f"{layer}.{MAGNITUDE}"] if lora.dora else None)

    return Readable(infos, read)


def stored_lora(root: Path) -> LoraSpec | None:
    """Return the adapters of the run in `root`, or None."""
    spec = stored_description(root).get("spec") or {}
    return None if "model" not in spec else ModelSpec.model_validate(spec["model"]).lora

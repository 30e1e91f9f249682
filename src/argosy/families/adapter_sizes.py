"""Which linear layers of a decoder have low-rank adapters (LoRA), how many parameters those have, and their names."""

from __future__ import annotations

from typing import NamedTuple

from argosy.config.model import ModelSpec

# The norms of an adapted weight's rows (DoRA).
MAGNITUDE = "lora_magnitude"
ADAPTERS = ("lora_a", "lora_b", MAGNITUDE)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(tuple(f".{adapter}" for adapter in ADAPTERS))


def weight_of_magnitude(name: str) -> str | None:
    """Return the name of the weight to which a parameter holds the norms of the rows, or None if it holds something else."""
    layer, _, kind = name.rpartition(".")
    return f"{layer}.weight" if kind == MAGNITUDE else None


def adapted_layers(spec: ModelSpec) -> list[str]:
    """Return the names of the adapted linear layers of a block: those of `lora.targets`, or all that the model has."""
    if spec.lora is None:
        return []
    return [name for name in _sizes(spec) if spec.lora.targets is None or name in spec.lora.targets]


class AdapterCount(NamedTuple):
    """Numbers of adapter parameters: those of the matrices, and the magnitudes of DoRA."""

    matrices: int
    magnitudes: int

    @property
    def total(self) -> int:
        return self.matrices + self.magnitudes


def adapter_parameters(spec: ModelSpec) -> tuple[AdapterCount, AdapterCount]:
    """Return the adapter parameters of a block with a dense MLP, and of one with experts, which have none themselves."""
    dense, moe = _of_layers(spec, adapted_layers(spec)), spec.moe
    if moe is None:
        return dense, AdapterCount(0, 0)
    if moe.shared_experts:
        shared = spec.model_copy(update={"ffn": moe.ffn * moe.shared_experts, "moe": None})
        return dense, adapter_parameters(shared)[0]
    return dense, _of_layers(spec, [name for name in adapted_layers(spec) if name in ("qkv", "out")])


def _of_layers(spec: ModelSpec, names: list[str]) -> AdapterCount:
    """Count the adapter parameters of these linear layers of a block."""
    if spec.lora is None:
        return AdapterCount(0, 0)
    sizes = [_sizes(spec)[name] for name in names]
    magnitudes = sum(outputs for _, outputs in sizes) if spec.lora.dora else 0
    return AdapterCount(spec.lora.rank * sum(map(sum, sizes)), magnitudes)


def _sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each linear layer of a block."""
    width = spec.heads * spec.head_dim
    sizes = {
        "qkv": (spec.hidden, width + 2 * spec.kv_heads * spec.head_dim),
        "out": (width, spec.hidden),
        "gate": (spec.hidden, spec.ffn),
        "up": (spec.hidden, spec.ffn),
        "down": (spec.ffn, spec.hidden),
    }
    return {name: size for name, size in sizes.items() if spec.gated or name != "gate"}

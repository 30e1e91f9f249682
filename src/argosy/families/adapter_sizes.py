"""Which linear layers of a decoder have low-rank adapters (LoRA), how many parameters those have, and their names."""

from __future__ import annotations

from argosy.config.model import ModelSpec

ADAPTERS = ("lora_a", "lora_b")


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(tuple(f".{adapter}" for adapter in ADAPTERS))


def adapted_layers(spec: ModelSpec) -> list[str]:
    """Return the names of the adapted linear layers of a block: those of `lora.targets`, or all that the model has."""
    if spec.lora is None:
        return []
    return [name for name in _sizes(spec) if spec.lora.targets is None or name in spec.lora.targets]


def adapter_parameters(spec: ModelSpec) -> tuple[int, int]:
    """Return the number of adapter parameters of a block with a dense MLP, and of one with experts, which have none themselves."""
    if spec.lora is None:
        return 0, 0
    sizes, moe = _sizes(spec), spec.moe
    dense = sum(spec.lora.rank * sum(sizes[name]) for name in adapted_layers(spec))
    attention = sum(spec.lora.rank * sum(sizes[name]) for name in adapted_layers(spec) if name in ("qkv", "out"))
    if moe is None:
        return dense, 0
    shared = spec.model_copy(update={"ffn": moe.ffn * moe.shared_experts, "moe": None})
    return dense, adapter_parameters(shared)[0] if moe.shared_experts else attention


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

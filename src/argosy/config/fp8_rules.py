"""The sizes that fp8 matmuls can have: widths of linear layers, and tokens of a forward pass.

The checks of a run spec, the planner and `argosy.parallel.precision` share these rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, lcm

from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of

# FP8 tensor cores need every dimension of a GEMM to be a multiple of this.
FP8_ALIGNMENT = 16
Widths = tuple[int, int]


def fits_fp8(*widths: int) -> bool:
    """Return whether fp8 matmuls can have dimensions of these sizes."""
    return all(width % FP8_ALIGNMENT == 0 for width in widths)


def block_widths(model: ModelSpec) -> set[Widths]:
    """Return (inputs, outputs) of the linear layers in the transformer blocks.

    Routed experts are not among them: their grouped matmuls stay in 16 bits.
    """
    moe, queries, keys = model.moe, model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    found = {(model.hidden, queries + keys), (queries, model.hidden)}
    if architecture_of(model).two_sequences:
        # The cross-attention of a decoder.
        found |= {(model.hidden, queries), (model.hidden, keys)}
    inner = [model.ffn] if moe is None or moe.dense_layers else []
    inner += [moe.shared_experts * moe.ffn] if moe is not None and moe.shared_experts else []
    for width in inner:
        found |= {(model.hidden, width), (width, model.hidden)}
    return found


def has_fp8_layers(model: ModelSpec) -> bool:
    """Return whether a linear layer of the blocks can use fp8 matmuls."""
    return any(fits_fp8(*widths) for widths in block_widths(model))


def require_fp8_layers(widths: Iterable[Widths], origin: str | None = None) -> None:
    """Raise ArgosyError if no linear layer of the blocks can use fp8 matmuls.

    Args:
        widths: inputs and outputs of the linear layers.
        origin: where the precision was asked for.
    """
    known = set(widths)
    if any(fits_fp8(*one) for one in known):
        return
    sizes = sorted({size for one in known for size in one})
    raise ArgosyError(
        "config.arithmetic",
        f"fp8 matmuls need both sizes of a linear layer to be multiples of {FP8_ALIGNMENT}, and no linear layer in the blocks has "
        f"that: their sizes are {', '.join(map(str, sizes))}",
        key="train.precision",
        value="fp8",
        origin=origin,
        fix=f"model.hidden and model.ffn that are multiples of {FP8_ALIGNMENT}, or train.precision=bf16",
    )


def fp8_micro_batch(lengths: Iterable[int | None], cp: int = 1) -> int:
    """Return the number of samples of which a micro-batch has to be a multiple, for tokens that fp8 matmuls can have.

    Args:
        lengths: tokens of each sequence of a sample; None for a length that only the data determines.
        cp: the context-parallel ranks, which share each sequence.
    """
    return lcm(*(FP8_ALIGNMENT // gcd(FP8_ALIGNMENT, length // cp if length else 1) for length in lengths))

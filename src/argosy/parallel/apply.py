"""How a plain model becomes the one that is trained: every change a layout makes to it, once, and in this order.

Models know nothing of this. Each change keeps the names of the parameters and the numbers that are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from argosy.config.schema import ParallelSpec
from argosy.parallel.recompute import apply_recompute


def apply_layout(model: nn.Module, parallel: ParallelSpec) -> None:
    """Recompute, then compile."""
    for block in blocks_of(model):
        apply_recompute(block, parallel.recompute)
        if parallel.compile == "block":
            block.compile()
    if parallel.compile == "model":
        model.compile()


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer blocks of every stack the model has."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "layers":
            yield from module.children()

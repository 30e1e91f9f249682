"""How a plain model becomes the one that is trained: every change a layout makes to it, once, and in this order.

Models know nothing of this. Each change keeps the names of the parameters and the numbers that are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from argosy.compat import tell_compiler
from argosy.config.schema import ParallelSpec
from argosy.model.ops.cross_entropy import hide_from_compiler
from argosy.parallel.cp import apply_cp
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import choose_precision
from argosy.parallel.recompute import apply_recompute


def apply_layout(model: nn.Module, parallel: ParallelSpec, mesh: Mesh, precision: str) -> None:
    """Tensor parallelism, then expert parallelism, then context parallelism, then recompute, then compile, then FSDP.
    Parameters that are cut have no memory until the end."""
    along = mesh.along("tp")
    if along is not None:
        from argosy.parallel.tensor.apply import apply_tensor_parallel  # as slow to import as what follows

        apply_tensor_parallel(model, along, sequence=parallel.sp)
    if (experts := mesh.along("ep")) is not None:
        from argosy.parallel.ep import apply_ep

        apply_ep(model, experts)
    if mesh.size("cp") > 1:
        apply_cp(model, mesh, parallel.cp_kind)
    if parallel.compile != "off":
        tell_compiler()
        hide_from_compiler()
    for block in blocks_of(model):
        apply_recompute(block, parallel.recompute)
        if parallel.compile == "block":
            block.compile()
    if parallel.compile == "model":
        model.compile()
    if mesh.has_fsdp:
        from argosy.parallel.fsdp import apply_fsdp  # takes most of a second to import, which one process saves

        apply_fsdp(model, blocks_of(model), mesh, parallel, choose_precision(precision, mesh.device))
    if mesh.is_sharded:
        model.to_empty(device=mesh.device)


def named_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The transformer blocks of every stack the model has."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "layers":
            for index, block in module.named_children():
                yield f"{name}.{index}", block


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    yield from (block for _, block in named_blocks(model))

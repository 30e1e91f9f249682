"""Changes to each transformer block of a model: activation checkpointing, torch.compile, dropout seeds.

Activation checkpointing (`parallel.recompute`) trades arithmetic for memory. `full` keeps the input of each block and runs the
block again in the backward pass: about a third more arithmetic. `selective` keeps the results of matmuls and attention too, and
recomputes only what is cheap: norms, activations, rope, 8-bit copies. Both give the bits of `none`, dropout included, but that on Hopper
`selective` computes gated MLPs matmul by matmul and `none` does not (`model/ops/mlp.py`).

Each block seeds its own dropout from (seed of the micro-batch, name of the block). Its mask therefore does not depend on earlier
random numbers: a rank that has only some of the blocks drops the same values as one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from argosy.compat import COSTLY_OPERATIONS, tell_compiler
from argosy.config.seeds import derive_seed
from argosy.model.attention import hide_pieces_from_compiler
from argosy.model.layers import MLP, Attention, AttentionBlock
from argosy.model.ops.attention_backends import OPERATIONS as ATTENTION_OPERATIONS
from argosy.model.ops.cross_entropy import hide_from_compiler
from argosy.model.ops.grouped import OPERATIONS as GROUPED_OPERATIONS
from argosy.model.retriever import Retriever
from argosy.model.sharding import Dropout
from argosy.parallel.cuda_graphs import draw_from, is_capturing

_KEPT = COSTLY_OPERATIONS | ATTENTION_OPERATIONS | GROUPED_OPERATIONS
# torch finds a kept result again by counting the operations of a block. The hooks of FSDP units inside a block open profiler ranges,
# not equally often in both passes.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def named_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and transformer blocks of every stack of the model."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "layers":
            for index, block in module.named_children():
                yield f"{name}.{index}", block


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    yield from (block for _, block in named_blocks(model))


def apply_recompute(model: nn.Module, how: str) -> None:
    """Wrap the forward pass of every block so that it keeps fewer activations."""
    for block in blocks_of(model):
        recompute_block(block, how)


def recompute_block(block: nn.Module, how: str) -> None:
    options: dict[str, Any] = {} if how == "full" else {"context_fn": _keep_costly}
    draws = any(isinstance(module, Dropout) and module.rate for module in block.modules())
    if how == "selective":
        # A kernel that multiplies and does something else would have to be run again as a whole.
        for module in block.modules():
            if isinstance(module, MLP):
                module.fuses_activation = False
            elif isinstance(module, Attention):
                module.fuses_rope = False
            elif isinstance(module, AttentionBlock):
                module.fuses_sums = False
    block.forward = partial(_recomputed, block, block.forward, options | {"preserve_rng_state": draws})


def _recomputed(block: nn.Module, forward: Callable[..., Any], options: dict[str, Any], *inputs: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


def _keep_costly() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply_compile(model: nn.Module, scope: str) -> None:
    """Apply torch.compile to the model, or to each block. Nothing is compiled before the first forward pass."""
    tell_compiler()
    hide_from_compiler()
    hide_pieces_from_compiler()
    for module in (model,) if scope == "model" else blocks_of(model):
        module.compile()


class DropoutSeeds:
    """Dropout seeds: a hook seeds every block of a model anew in each forward pass.

    No hook is used for a model that is compiled whole or that sends two texts through the same blocks (a retriever): it draws
    from one generator. The same holds for a model that no engine trains, whose caller does the seeding."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._run_seed = seed
        # The seed of the micro-batch. None: no micro-batch was begun.
        self._seed: int | None = None
        # While a CUDA graph is captured: the generator of each block, by its name.
        self._captured: dict[str, torch.Generator] = {}
        # The names of the blocks that a hook seeds.
        self._seeded: list[str] = []
        self._drops = any(isinstance(module, Dropout) and module.rate for module in model.modules())
        if self._drops and model._compiled_call_impl is None and not isinstance(model, Retriever):
            for name, block in named_blocks(model):
                self._seeded.append(name)
                hook = self._hook(name)
                # Hooks of a compiled block are traced with it. Elsewhere `disable` would only import the compiler: over a second.
                compiled = block._compiled_call_impl is not None
                block.register_forward_pre_hook(torch.compiler.disable(hook) if compiled else hook)

    def begin(self, step: int, micro: int) -> None:
        """Set the seed for micro-batch `micro` of a step. Call this before each forward pass of the model or of a stage."""
        if self._drops:
            self._seed = derive_seed(self._run_seed, "dropout", step, micro)
            _seed_generators(self._seed)
            self._seed_captured()

    def captured(self, device: torch.device) -> list[torch.Generator]:
        """Return the generators that the blocks draw from in a CUDA graph, which has to register them before it is captured.

        A graph reads a generator's seed when it is replayed. It cannot change a seed, so each block has a generator of its own, which
        `begin` seeds from now on."""
        if not self._captured:
            self._captured = {name: torch.Generator(device) for name in self._seeded}
            self._seed_captured()
        return list(self._captured.values())

    def _seed_captured(self) -> None:
        for name, generator in self._captured.items():
            if self._seed is not None:
                generator.manual_seed(derive_seed(self._seed, name))

    def _hook(self, name: str) -> Any:
        def seed(block: nn.Module, inputs: Any) -> None:
            if not block.training or self._seed is None:
                return
            if is_capturing():
                draw_from(self._captured[name])
            else:
                _seed_generators(derive_seed(self._seed, name))

        return seed


def _seed_generators(seed: int) -> None:
    """Seed the generators of the CPU and of the GPUs in use, as `torch.manual_seed` does.

    For each kind of device that is not in use, that function stores the seed with a formatted stack, for later: milliseconds
    and memory that no one frees, at every call."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)

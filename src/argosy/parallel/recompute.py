"""Trading arithmetic for memory: what the backward pass needs is kept, or made again from less.

`full` keeps the input of each block and runs the block again in the backward pass: about a third more arithmetic.
`selective` keeps the results of the products and of attention too, and makes again only what is cheap: norms, activations,
rotations, 8-bit copies. Both give the bits of `none`, dropout included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from argosy.compat import COSTLY_OPERATIONS
from argosy.model.dropout import Dropout
from argosy.model.ops.attention_backends import OPERATIONS as ATTENTION_OPERATIONS
from argosy.model.ops.grouped import OPERATIONS as GROUPED_OPERATIONS

_KEPT = COSTLY_OPERATIONS | ATTENTION_OPERATIONS | GROUPED_OPERATIONS


def apply_recompute(block: nn.Module, how: str) -> None:
    """From now on the block's forward pass keeps less. Its name and those of its parameters stay."""
    if how != "none":
        options: dict[str, Any] = {} if how == "full" else {"context_fn": _keep_costly}
        draws = any(isinstance(module, Dropout) and module.rate for module in block.modules())
        block.forward = partial(_recomputed, block, block.forward, options | {"preserve_rng_state": draws})


def _recomputed(block: nn.Module, forward: Callable[..., Any], options: dict[str, Any], *inputs: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


def _keep_costly() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

"""Random numbers that depend on where in the model they are drawn, and not on what was drawn before: each block begins with a
seed of its own, made of (seed of the micro-batch, the block's name). So a rank that has only some of the blocks drops what
one process drops there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from argosy.config.seeds import derive_seed
from argosy.model.dropout import Dropout
from argosy.model.retriever import Retriever
from argosy.parallel.apply import named_blocks


class DropoutSeeds:
    """A model that is compiled whole, or that has two texts go through the same blocks, draws as it goes."""

    def __init__(self, model: nn.Module) -> None:
        self._seed = 0
        drops = any(isinstance(module, Dropout) and module.rate for module in model.modules())
        if drops and model._compiled_call_impl is None and not isinstance(model, Retriever):
            for name, block in named_blocks(model):
                block.register_forward_pre_hook(self._hook(name))

    def begin(self, seed: int) -> None:
        """Before the forward pass of a micro-batch, or of a part of the model for it."""
        self._seed = seed
        torch.manual_seed(seed)

    def _hook(self, name: str) -> Any:
        def seed(block: nn.Module, inputs: Any) -> None:
            if block.training:
                torch.manual_seed(derive_seed(self._seed, name))

        return torch.compiler.disable(seed)

"""The interface between training and layouts: whatever the layout, the trainer sees an `Engine` and gets a `Result`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from argosy.data.samples.windows import Batch
from argosy.model.kv_cache import KeyValueCache


class Result(NamedTuple):
    """The sums over one global batch. `loss_sum` and `metrics` stay on the device: nothing waits for them until they are
    logged, divided by `tokens`."""

    loss_sum: Tensor
    # A tensor if it is a sum over ranks.
    tokens: int | Tensor
    metrics: dict[str, Tensor]
    # Rows each expert got. [layers with experts, experts]
    expert_load: Tensor | None = None


class Engine(Protocol):
    """A model on its devices, made by `parallelize`."""

    # The part of the model that this rank holds. Parameters have the names they have in one process.
    model: nn.Module
    device: torch.device
    # Ranks that share a global batch.
    data_ranks: int
    # Called with the name of each part of a step as it begins.
    on_phase: Callable[[str], None]

    def place(self, batch: Batch) -> Batch:
        """Copy a batch to memory that the device reads fast. The loader's thread calls this ahead of the step."""
        ...

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        """Add the gradients of the summed loss of the global batch, times `loss_scale`, to the parameters. `batch` is this
        rank's share of it."""
        ...

    def evaluate(self, batch: Batch) -> Result:
        """Sum the loss of a batch that every rank has whole."""
        ...

    def make_room(self) -> None:
        """Free memory that only training steps need: that of CUDA graphs. All ranks call it, before other work between two steps.

        `evaluate` needs no such call."""
        ...

    def logits(
        self, tokens: Tensor, *, logits_at: Tensor | None = None, cache: KeyValueCache | None = None, **others: Tensor
    ) -> Tensor:
        """Return the logits of the tokens `logits_at`, as a decoder does. The model has to be in evaluation mode.

        Ranks that share a forward pass have to pass the same. Without `takes_cache`, `logits_at` is required and `cache` refused.
        """
        ...

    @property
    def takes_cache(self) -> bool:
        """True if a forward pass may have one token, whose past is in a key/value cache."""
        ...

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm of the gradients of all parameters. `gradients` are those of this rank, by name."""
        ...

    def accumulates(self, samples: int) -> bool:
        """True if the gradients of `samples` samples on this rank accumulate in 32 bits, whatever the dtype of the parameters."""
        ...

    @property
    def uses_cuda_graph(self) -> bool:
        """True if forward and backward passes are replayed as a CUDA graph."""
        ...

    def news(self) -> list[str]:
        """Return the messages for the user since the last call."""
        ...


def ignore_phase(name: str) -> None:
    """Do nothing: the `on_phase` of an engine that nobody measures."""

"""One process, one device: the layout every other is compared with.

The global batch is cut into micro-batches whose gradients add up. Losses are sums; the trainer divides once, by the
number of valid tokens of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from argosy.config.schema import ParallelSpec
from argosy.config.seeds import derive_seed
from argosy.data.samples.windows import Batch
from argosy.errors import ArgosyError

LossSum = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> summed loss


class Result(NamedTuple):
    """Of one global batch. `loss_sum` stays on the device, so that nothing waits for it until it is logged."""

    loss_sum: Tensor
    tokens: int
    metrics: dict[str, Tensor]


class SingleDevice:
    def __init__(
        self, model: nn.Module, loss_sum: LossSum, *, micro_batch: int, seed: int, device: torch.device
    ) -> None:
        self.model, self.loss_sum, self.device = model, loss_sum, device
        self.micro_batch, self.seed = micro_batch, seed

    def forward_backward(self, batch: Batch, step: int) -> Result:
        """Add the gradients of the summed loss of `batch` to the parameters."""
        total = torch.zeros((), device=self.device)
        for micro, first in enumerate(range(0, len(batch.tokens), self.micro_batch)):
            torch.manual_seed(derive_seed(self.seed, "dropout", step, micro))
            loss = self._loss(batch, first)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return Result(total, batch.valid_tokens, {})

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for first in range(0, len(batch.tokens), self.micro_batch):
            total += self._loss(batch, first)
        self.model.train()
        return Result(total, batch.valid_tokens, {})

    def _loss(self, batch: Batch, first: int) -> Tensor:
        rows = slice(first, first + self.micro_batch)
        tokens = torch.from_numpy(batch.tokens[rows]).to(self.device, non_blocking=True)
        labels = torch.from_numpy(batch.labels[rows]).to(self.device, non_blocking=True)
        return self.loss_sum(self.model(tokens), labels)


def require_single(parallel: ParallelSpec) -> None:
    """Refuse a layout this process cannot be, with the arithmetic."""
    if parallel.world_size == 1 and parallel.ep == 1:
        return
    axes = {axis: getattr(parallel, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")}
    product = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    raise ArgosyError(
        "config.arithmetic",
        f"the layout {product} needs {max(parallel.world_size, parallel.ep)} processes; this version trains in 1",
        key="parallel",
        fix="parallel=auto",
    )

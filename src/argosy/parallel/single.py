"""One process, one device: the engine every other layout is compared with.

Losses are sums; the trainer divides once, by the number of valid tokens of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from argosy.data.samples.windows import Batch
from argosy.model.objective import Objective
from argosy.parallel.cuda_graphs import CudaGraphs
from argosy.parallel.engine import Result, ignore_phase
from argosy.parallel.micro_batches import MicroBatches
from argosy.parallel.shards import norm_of
from argosy.parallel.transformer_blocks import DropoutSeeds


class SingleDevice:
    """An `Engine`."""

    data_ranks = 1

    def __init__(
        self,
        model: nn.Module,
        dropout: DropoutSeeds,
        *,
        micro_batch: int,
        device: torch.device,
        z_loss: float = 0.0,
        cuda_graphs: bool = False,
    ) -> None:
        """With `cuda_graphs`, passes are recorded and replayed where the host is slower than the device."""
        self.model, self.device = model, device
        self.on_phase: Callable[[str], None] = ignore_phase
        self._z_loss = z_loss
        self._micro_batches = MicroBatches(model, dropout, size=micro_batch, device=device)
        self._run_micro = self._micro_batches.forward_backward_micro
        self._graphs = CudaGraphs(self._run_micro, model.parameters(), device) if cuda_graphs else None

    def place(self, batch: Batch) -> Batch:
        return self._micro_batches.place(batch)

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        objective = self._objective(batch, loss_scale)
        return self._micro_batches.forward_backward(batch, step, objective, run=self._graphs or self._run_micro)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        self.model.eval()
        result = self._micro_batches.evaluate(batch, self._objective(batch))
        self.model.train()
        return result

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return norm_of(list(gradients.values()))

    def accumulates(self, samples: int) -> bool:
        return self._micro_batches.accumulates(samples)

    @property
    def uses_cuda_graph(self) -> bool:
        return self._graphs is not None and bool(self._graphs.wanted)

    def news(self) -> list[str]:
        return [] if self._graphs is None else self._graphs.take_news()

    def _objective(self, batch: Batch, loss_scale: Tensor | float = 1.0) -> Objective:
        tokens_per_sample = torch.full((), batch.valid_tokens / len(batch.tokens), device=self.device)
        return Objective(self._z_loss, loss_scale, tokens_per_sample)

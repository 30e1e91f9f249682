"""One process, one device: the layout every other is compared with, and the engine others extend.

The global batch is cut into micro-batches whose gradients add up. Losses are sums; the trainer divides once, by the
number of valid tokens of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from argosy.compat import accumulate_in
from argosy.config.seeds import derive_seed
from argosy.data.samples.windows import Batch
from argosy.model.objective import Loss, Objective
from argosy.parallel.cuda_graphs import CudaGraphs
from argosy.parallel.dropout_seeds import DropoutSeeds
from argosy.parallel.pinned_memory import copied, tensors_of
from argosy.parallel.shards import norm_of


class Result(NamedTuple):
    """Of one global batch. `loss_sum` and `metrics` stay on the device, so that nothing waits for them until they are
    logged, divided by `tokens`."""

    loss_sum: Tensor
    tokens: int | Tensor  # a tensor where it is a sum over ranks
    metrics: dict[str, Tensor]
    expert_load: Tensor | None = None  # rows each expert got  # [layers with experts, experts]


class SingleDevice:
    data_ranks = 1  # that share a global batch

    def __init__(
        self, model: nn.Module, *, micro_batch: int, seed: int, device: torch.device, z_loss: float = 0.0
    ) -> None:
        self.model, self.device = model, device
        self.micro_batch, self.seed, self.z_loss = micro_batch, seed, z_loss
        self.enter: Callable[[str], None] = _unmeasured  # told which part of a step begins
        self._dropout = DropoutSeeds(model)
        self.replays: CudaGraphs | None = None

    def replay(self) -> None:
        """Record passes and replay them, where the host is slower than the device."""
        self.replays = CudaGraphs(self._learn, self.model.parameters(), self.device)

    def news(self) -> list[str]:
        """What there is to tell since this was last asked."""
        if self.replays is None:
            return []
        news, self.replays.news = self.replays.news, []
        return news

    def place(self, batch: Batch) -> Batch:
        """The batch where the device reads it best; for the loader's thread, ahead of the step that needs it."""
        if self.device.type != "cuda":
            return batch
        with torch.cuda.device(self.device):  # a new thread would lock pages for the first GPU
            return copied(batch, pinned=True)

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        """Add the gradients of the summed loss of `batch`, times `loss_scale`, to the parameters."""
        self._prepare_gradients(torch.float32 if self.accumulates(len(batch.tokens)) else None)
        total, metrics, objective = zero_sum(self.device), Sums(), self._objective(batch, loss_scale)
        load: Tensor | None = None
        firsts = range(0, len(batch.tokens), self.micro_batch)
        for micro, first in enumerate(firsts, start=self._first_micro(len(firsts))):
            self._before_micro(last=first == firsts[-1])
            self._dropout.begin(derive_seed(self.seed, "dropout", step, micro))
            loss = (self.replays or self._learn)(*self._inputs(batch, first, objective))
            total += loss.cross_entropy
            metrics.add(loss.metrics)
            load = loss.expert_load if load is None or loss.expert_load is None else load + loss.expert_load
        return Result(total, batch.valid_tokens, metrics, load)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The 2-norm of the gradients of all parameters, of which this rank has those given."""
        return norm_of(list(gradients.values()))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        self.model.eval()
        total, metrics, objective = zero_sum(self.device), Sums(), self._objective(batch)
        for first in range(0, len(batch.tokens), self.micro_batch):
            loss = self._loss(batch, first, objective)
            total += loss.cross_entropy
            metrics.add(loss.metrics)
        self.model.train()
        return Result(total, batch.valid_tokens, metrics)

    def _first_micro(self, count: int) -> int:
        """Which of the global batch's micro-batches the first of our `count` is."""
        return 0

    def _before_micro(self, *, last: bool) -> None:
        """For layouts that have to know which backward pass is a step's last."""

    def _objective(self, batch: Batch, loss_scale: Tensor | float = 1.0) -> Objective:
        tokens_per_sample = torch.full((), batch.valid_tokens / len(batch.tokens), device=self.device)
        return Objective(self.z_loss, loss_scale, tokens_per_sample)

    def _learn(self, inputs: dict[str, Tensor], objective: Objective) -> Loss:
        """Forward and back."""
        loss = self._forward(inputs, objective)
        loss.total.backward()
        return loss

    def _loss(self, batch: Batch, first: int, objective: Objective) -> Loss:
        return self._forward(*self._inputs(batch, first, objective))

    def _forward(self, inputs: dict[str, Tensor], objective: Objective) -> Loss:
        others = {name: tensor for name, tensor in inputs.items() if name not in ("tokens", "labels")}
        loss: Loss = self.model(inputs["tokens"], inputs["labels"], objective, **others)
        return loss

    def _inputs(self, batch: Batch, first: int, objective: Objective) -> tuple[dict[str, Tensor], Objective]:
        """What the model is given of the micro-batch that begins at sample `first`, on the device, and how its loss is made."""
        rows = slice(first, first + self.micro_batch)
        inputs = {name: tensor[rows].to(self.device, non_blocking=True) for name, tensor in tensors_of(batch).items()}
        return inputs, objective

    def accumulates(self, samples: int) -> bool:
        """Whether the gradients of so many samples add up in 32 bits, whatever the parameters are: those of one micro-batch
        stay as they were computed."""
        return samples > self.micro_batch

    def _prepare_gradients(self, dtype: torch.dtype | None) -> None:
        for parameter in self.model.parameters():
            if parameter.dtype != torch.float32:
                accumulate_in(parameter, dtype or parameter.dtype)


def _unmeasured(part: str) -> None: ...


def zero_sum(device: torch.device) -> Tensor:
    """The start of a sum over micro-batches, of which there may be thousands: in 64 bits."""
    return torch.zeros((), dtype=torch.float64, device=device)


class Sums(dict[str, Tensor]):
    """Sums over micro-batches by name, in 64 bits."""

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self[name] = self[name] + value if name in self else value.double()

"""A stand-in for the recorder of CUDA graphs, for tests without a GPU: it runs the pass again on the recording's own memory, which is
what a replay does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from argosy.model.objective import Loss, Objective
from argosy.parallel import cuda_graphs
from argosy.parallel.cuda_graphs import Inputs, Pass, Recording


def captured(run: Pass, inputs: Inputs, objective: Objective) -> Loss:
    """Run a pass whose gradients are not summed beside it, as in a capture. Dropout draws as in a launched pass."""
    with patch.object(cuda_graphs, "is_capturing", lambda: True):
        return run(inputs, objective)


@dataclass
class Rerun:
    run: Pass
    inputs: Inputs
    objective: Objective
    loss: Loss
    parameters: list[nn.Parameter]
    gradients: list[Tensor | None]  # before the pass
    made: list[Tensor | None]

    def replay(self) -> None:
        for parameter, before in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = before
        loss = captured(self.run, self.inputs, self.objective)
        for parameter, mine in zip(self.parameters, self.made, strict=True):
            if mine is not None and parameter.grad is not mine:
                mine.copy_(parameter.grad)
        self.loss.cross_entropy.copy_(loss.cross_entropy)
        if self.loss.expert_load is not None:
            self.loss.expert_load.copy_(loss.expert_load)
        for name, value in loss.metrics.items():
            self.loss.metrics[name].copy_(value)

    def reset(self) -> None:
        self.parameters, self.gradients, self.made = [], [], []


def rerun(
    run: Pass, inputs: Inputs, objective: Objective, parameters: list[nn.Parameter], pool: object, generators: object
) -> Recording:
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    objective = cuda_graphs._held(objective)
    before = [p.grad for p in parameters]
    values = [None if g is None else g.clone() for g in before]
    state = torch.get_rng_state()
    loss = cuda_graphs._detached(captured(run, inputs, objective), Tensor.detach)
    made = [p.grad for p in parameters]
    # A recording does nothing yet.
    torch.set_rng_state(state)
    for gradient, value in zip(before, values, strict=True):
        if gradient is not None and value is not None:
            gradient.copy_(value)
    return Recording(inputs, objective, loss, Rerun(run, inputs, objective, loss, parameters, before, made), made)


@contextmanager
def recording_by_rerun() -> Iterator[list[object]]:
    """Record by `rerun`. The list gets an entry for each recording that is tried."""
    made: list[object] = []

    def count(*arguments: object) -> Recording:
        made.append(arguments)
        return rerun(*arguments)  # type: ignore[arg-type]

    with (
        patch.object(cuda_graphs, "record", count),
        patch.object(torch.cuda, "graph_pool_handle", lambda: "pool"),
    ):
        yield made

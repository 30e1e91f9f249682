"""The pipeline runtime: runs the actions of one step on one rank, in order.

After the forward pass of a micro-batch through a stage, only its inputs and outputs are kept until its backward pass. torch's own
runtime, whose schedules are used here, keeps buffers for all micro-batches of a step in both directions, and needs an extra pass
to learn their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.model.objective import Loss, Stream
from argosy.model.ops.matmul import Later, separable, weights_later
from argosy.parallel.pipeline.schedules import Action
from argosy.parallel.pipeline.stage_messages import Form, Mail, Pending

# (stage, micro-batch)
Key = tuple[int, int]
# The forms of the stream that leaves a stage for a micro-batch.
Forms = Callable[[int, int], Sequence[Form]]
Around = Callable[[Action], AbstractContextManager[None]]


class Pass(Protocol):
    """The forward pass of one stage for one micro-batch. `stream` is the output of the previous stage."""

    def __call__(self, stage: int, micro: int, stream: tuple[Tensor, ...] | None) -> Loss | Stream: ...


@dataclass
class _State:
    """The tensors and messages in flight during a step."""

    # Streams that are being received.
    arriving: dict[Key, Pending] = field(default_factory=dict)
    # Gradients of streams that are being received.
    returning: dict[Key, Pending] = field(default_factory=dict)
    # Outputs of stages here, until they are sent or the next stage here reads them.
    streams: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    inputs: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    outputs: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    # Weight gradients that were deferred.
    later: dict[Key, Later] = field(default_factory=dict)
    sent: list[Pending] = field(default_factory=list)


class Runtime:
    """The runtime of one pipeline rank. `ranks[s]` is the pipeline rank of stage s."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self._mail, self._ranks = Mail(group, device), ranks

    def run(
        self,
        actions: Sequence[Action],
        forward: Pass,
        forms: Forms,
        *,
        training: bool,
        around: Around = lambda action: nullcontext(),
    ) -> dict[Key, Loss | Stream]:
        """Run the actions and return the reports of the forward passes.

        Args:
            around: returns the context in which an action runs.
        """
        in_halves = any(action.kind == "W" for action in actions)
        with separable() if in_halves else nullcontext():
            return self._run(actions, forward, forms, training, around)

    def _run(
        self, actions: Sequence[Action], forward: Pass, forms: Forms, training: bool, around: Around
    ) -> dict[Key, Loss | Stream]:
        state, reports = _State(), dict[Key, Loss | Stream]()
        for action in actions:
            with around(action):
                self._act(action, state, reports, forward, forms, training)
        for message in state.sent:
            message.wait()
        return reports

    def _act(
        self,
        action: Action,
        state: _State,
        reports: dict[Key, Loss | Stream],
        forward: Pass,
        forms: Forms,
        training: bool,
    ) -> None:
        key = action.stage, action.micro
        if action.kind == "F":
            reports[key] = self._forward(state, key, forward, training)
        elif action.kind in ("B", "I"):
            self._backward(state, key, put_off=action.kind == "I")
        elif action.kind == "W":
            state.later.pop(key).run()
        elif action.kind == "send F":
            state.sent.append(self._mail.send(state.streams.pop(key), self._ranks[action.stage + 1]))
        elif action.kind == "receive F":
            source = action.stage - 1
            state.arriving[key] = self._mail.receive(forms(source, action.micro), self._ranks[source])
        elif action.kind == "send B":
            state.sent.append(self._mail.send(state.gradients.pop(key), self._ranks[action.stage - 1]))
        else:
            made = [Form(tuple(t.shape), t.dtype) for t in state.outputs[key]]
            state.returning[key] = self._mail.receive(made, self._ranks[action.stage + 1])

    def _forward(self, state: _State, key: Key, forward: Pass, training: bool) -> Loss | Stream:
        stage, micro = key
        stream: tuple[Tensor, ...] | None = None
        if stage:
            before = stage - 1, micro
            stream = state.arriving.pop(key).wait() if key in state.arriving else state.streams.pop(before)
            stream = tuple(tensor.detach().requires_grad_(training) for tensor in stream)
        found = forward(stage, micro, stream)
        made = (found.total,) if isinstance(found, Loss) else found.tensors
        if training:
            state.inputs[key], state.outputs[key] = stream or (), made
        if isinstance(found, Loss):
            return found._replace(total=found.total.detach())
        state.streams[key] = made
        return found._replace(tensors=())

    def _backward(self, state: _State, key: Key, *, put_off: bool) -> None:
        stage, micro = key
        outputs, inputs = state.outputs.pop(key), state.inputs.pop(key)
        gradients: tuple[Tensor, ...] | None = None
        if stage < len(self._ranks) - 1:
            after = stage + 1, micro
            gradients = state.returning.pop(key).wait() if key in state.returning else state.gradients.pop(after)
        if put_off:
            with weights_later() as state.later[key]:
                torch.autograd.backward(outputs, gradients)
        else:
            torch.autograd.backward(outputs, gradients)
        if inputs:
            state.gradients[key] = tuple(_gradient(tensor) for tensor in inputs)


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a stream: zeros if the stage did not use the stream."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

"""Who does what when: every rank's work of a step as one list of actions, messages included.

The interleaved and the zero-bubble orders are torch's; the two that need one stage a rank are a few lines, and unlike torch's
take any number of micro-batches. Messages are then put in by replaying all ranks together: a send and its receive are added
at the same moment, so that two ranks always have what they exchange in the same order, and none can wait for ever.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from argosy.compat import torch_schedule
from argosy.config.stage_layers import rank_of_stage

# forward; backward whole, or in two halves: the gradients of inputs, then those of weights; messages of both passes
Kind = Literal["F", "B", "I", "W", "send F", "receive F", "send B", "receive B"]


class Action(NamedTuple):
    kind: Kind
    stage: int
    micro: int


Orders = list[list[Action]]  # by rank


def training_order(schedule: str, ranks: int, pieces: int, micros: int) -> Orders:
    """Forward and backward passes of all micro-batches."""
    if schedule == "gpipe":
        return [
            [Action("F", rank, m) for m in range(micros)] + [Action("B", rank, m) for m in range(micros)]
            for rank in range(ranks)
        ]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, micros) for rank in range(ranks)]
    found = torch_schedule(schedule, ranks, pieces, micros)
    return [[Action(kind, stage, micro) for kind, stage, micro in order] for order in found]


def forward_order(schedule: str, ranks: int, pieces: int, micros: int) -> Orders:
    """Forward passes only: a rank's stages in turn, all micro-batches through each."""
    orders: Orders = [[] for _ in range(ranks)]
    for stage in range(ranks * pieces):
        orders[rank_of_stage(schedule, ranks, stage)] += [Action("F", stage, micro) for micro in range(micros)]
    return orders


def with_messages(orders: Orders, schedule: str) -> Orders:
    """The same with what ranks send each other. Neighbouring stages of one rank need no message."""
    full: Orders = [[] for _ in orders]
    waiting = [deque(order) for order in orders]
    last = max(action.stage for order in orders for action in order)
    done: set[Action] = set()
    while any(waiting):
        ready = [rank for rank, queue in enumerate(waiting) if queue and _is_ready(queue[0], last, done)]
        if not ready:
            raise AssertionError(f"no rank can go on: {[queue[0] for queue in waiting if queue]}")
        for rank in ready:
            action = waiting[rank].popleft()
            done.add(action)
            full[rank].append(action)
            to = _reader(action)
            there = None if to is None or not 0 <= to <= last else rank_of_stage(schedule, len(orders), to)
            if to is not None and there is not None and there != rank:
                forward = action.kind == "F"
                full[rank].append(Action("send F" if forward else "send B", action.stage, action.micro))
                full[there].append(Action("receive F" if forward else "receive B", to, action.micro))
    return full


def _one_forward_one_backward(rank: int, ranks: int, micros: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, micros)
    order = [Action("F", rank, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            order.append(Action("F", rank, micro + ahead))
        order.append(Action("B", rank, micro))
    return order


def _reader(action: Action) -> int | None:
    """The stage that goes on from what an action makes."""
    if action.kind == "W":
        return None
    return action.stage + 1 if action.kind == "F" else action.stage - 1


def sources(action: Action, last: int) -> tuple[Action, ...]:
    """Of which one has to be done first, on whichever rank."""
    kind, stage, micro = action
    if kind == "F" and stage > 0:
        return (Action("F", stage - 1, micro),)
    if kind in ("B", "I") and stage < last:
        return Action("B", stage + 1, micro), Action("I", stage + 1, micro)
    return ()


def _is_ready(action: Action, last: int, done: set[Action]) -> bool:
    needed = sources(action, last)
    return not needed or any(source in done for source in needed)

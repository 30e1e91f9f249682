"""Pipeline schedules: the actions of every rank in a step as one list, messages included.

The interleaved and zero-bubble schedules are torch's. GPipe and 1F1B, with one stage a rank, are a few lines here, and unlike
torch's take any number of micro-batches. Messages are then inserted by simulating all ranks together: a send and its receive are
added at the same moment. Two ranks therefore exchange their messages in the same order, and no rank can deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from argosy.compat import torch_schedule
from argosy.config.stage_layers import rank_of_stage

# F: forward. B: whole backward. I and W: backward in two halves, gradients of inputs, then of weights. The rest are messages.
Kind = Literal["F", "B", "I", "W", "send F", "receive F", "send B", "receive B"]


class Action(NamedTuple):
    kind: Kind
    stage: int
    micro: int


# The actions of each rank.
Orders = list[list[Action]]


def training_order(schedule: str, ranks: int, pieces: int, micros: int) -> Orders:
    """Return the forward and backward passes of all micro-batches, by rank."""
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
    """Return forward passes only, by rank: all micro-batches through each of a rank's stages in turn."""
    orders: Orders = [[] for _ in range(ranks)]
    for stage in range(ranks * pieces):
        orders[rank_of_stage(schedule, ranks, stage)] += [Action("F", stage, micro) for micro in range(micros)]
    return orders


def with_messages(orders: Orders, schedule: str) -> Orders:
    """Return the orders with sends and receives inserted. Neighbouring stages of one rank need no message."""
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


def last_gradients(actions: Iterable[Action]) -> list[Action]:
    """Return the last action of each stage that computes gradients of weights, in their order."""
    found: dict[int, Action] = {}
    for action in actions:
        if action.kind in ("B", "I", "W"):
            found.pop(action.stage, None)
            found[action.stage] = action
    return list(found.values())


def _one_forward_one_backward(rank: int, ranks: int, micros: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, micros)
    order = [Action("F", rank, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            order.append(Action("F", rank, micro + ahead))
        order.append(Action("B", rank, micro))
    return order


def _reader(action: Action) -> int | None:
    """Return the stage that reads the output of an action; None if no stage does."""
    if action.kind == "W":
        return None
    return action.stage + 1 if action.kind == "F" else action.stage - 1


def sources(action: Action, last: int) -> tuple[Action, ...]:
    """Return the actions of which one has to be done before `action`, on whichever rank."""
    kind, stage, micro = action
    if kind == "F" and stage > 0:
        return (Action("F", stage - 1, micro),)
    if kind in ("B", "I") and stage < last:
        return Action("B", stage + 1, micro), Action("I", stage + 1, micro)
    return ()


def _is_ready(action: Action, last: int, done: set[Action]) -> bool:
    needed = sources(action, last)
    return not needed or any(source in done for source in needed)

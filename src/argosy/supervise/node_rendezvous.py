"""The rendezvous of a job's nodes: every agent waits here until all nodes have joined, again after each failure.

Every node knows its own index and their number, so a node joins with two increments in the store of node 0, and asks it one
small number a second from then on. torch's dynamic rendezvous lets nodes find out how many they are: all of them rewrite one
record that lists all of them. 96 agents did not finish that in 100 seconds, and it grows with the square of their number.

A round is one meeting. It is complete when every node has joined it. A node that joins a round for the second time, because its
ranks failed or because its agent is new, opens the next round; the other nodes see the number of the round change, and follow.
One key has the current round and the last one that was complete: a round that was left is not completed, and all nodes of a
complete one return from it, however soon the next is opened.

A new agent takes the place of the one before it. An agent that has lost its place neither joins again nor ends the job: two agents
that were given one index would open rounds for ever.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from argosy.supervise.world import Nodes

_ROUNDS, _CLOSED, _PORT = "rounds", "closed", "port"
# Seconds between two looks at the store: of a node that waits for the others, and of a node whose ranks run.
_WAIT_S, LOOK_S = 0.2, 1.0


class PlaceTakenError(RendezvousError):
    """Another agent has joined as the node that this agent is."""


def open_store(nodes: Nodes, timeout_s: float) -> Store:
    """Return the store that node 0 hosts. A single node picks a free port."""
    return _tcp_store(
        nodes, 0 if nodes.count == 1 else nodes.port, multi_tenant=True, timeout=timedelta(seconds=timeout_s)
    )


def _tcp_store(nodes: Nodes, port: int, **options: Any) -> TCPStore:
    try:
        return TCPStore(_address(nodes), port, is_master=nodes.index == 0, wait_for_workers=False, **options)
    except (DistError, ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(str(error)) from error


def _address(nodes: Nodes) -> str:
    return "localhost" if nodes.count == 1 else nodes.address


@dataclass
class Place:
    """The claim of one agent to be a node, under a name that no other agent has."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    taken: bool = False


class NodeRendezvous(RendezvousHandler):
    """One node's part in the meetings of all nodes.

    Args:
        store: the store that all nodes share.
        wait_s: seconds that a node waits for the others.
        place: this agent's claim to be the node. One that lost the others and comes again has the same.
    """

    def __init__(self, store: Store, nodes: Nodes, wait_s: float, place: Place) -> None:
        self._store, self._nodes, self._wait_s = PrefixStore("argosy-nodes", store), nodes, wait_s
        # The round that this node has joined. The first is 1.
        self._round = 0
        self._looked, self._newest = float("-inf"), 0
        # The store of this round's ranks, on node 0.
        self._ranks: TCPStore | None = None
        self._place, self._name = f"place-{nodes.index}", place.name
        if place.taken:
            # Another agent may have it by now.
            self._store.compare_set(self._place, "", place.name)
        else:
            self._store.set(self._place, place.name)
            place.taken = True
        if nodes.index == 0:
            # A new agent of node 0 may find its old store, which the last agent closed.
            self._store.delete_key(_CLOSED)
            self._store.compare_set(_ROUNDS, "", "1 0")

    def get_backend(self) -> str:
        return "argosy"

    def get_run_id(self) -> str:
        return "argosy"

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks connect to a store of node 0's agent. A store of rank 0 would need a port that is still free when it starts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and wait until all nodes have.

        Raises:
            PlaceTakenError: a newer agent of this node has come.
            RendezvousClosedError: a node has ended the job.
            RendezvousTimeoutError: not all nodes came in time.
        """
        deadline = time.monotonic() + self._wait_s
        self._join()
        while True:
            current, complete = self._rounds()
            if complete == self._round:
                break
            if self.is_closed():
                raise RendezvousClosedError("another node has ended the job")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"{self._joined()} of {self._nodes.count} nodes have come")
            if current != self._round:
                self._join()
            else:
                time.sleep(_WAIT_S)
        self._looked, self._newest = time.monotonic(), self._round
        store = PrefixStore(f"{self._round}", self._store)
        if self._nodes.index == 0:
            # The ranks of every round get a new store: in an old one they would find keys of the round before.
            self._ranks = _tcp_store(self._nodes, 0)
            store.set(_PORT, str(self._ranks.port))
        # The port is node 0's; the address that by which this node has found node 0, which may know itself by another.
        info = RendezvousStoreInfo(_address(self._nodes), int(store.get(_PORT)))
        return RendezvousInfo(store, self._nodes.index, self._nodes.count, info)

    def _join(self) -> None:
        """Join the current round, or the next one if a node of this index has joined the current one before."""
        if not self._has_place():
            raise PlaceTakenError(f"another agent has joined as node {self._nodes.index}")
        current, complete = self._rounds()
        while self._store.add(f"{current}/node-{self._nodes.index}", 1) > 1:
            # Of several nodes that leave a round, one opens the next. If it was completed just now, this node comes here again.
            self._store.compare_set(_ROUNDS, f"{current} {complete}", f"{current + 1} {complete}")
            current, complete = self._rounds()
        self._round = current
        if self._store.add(f"{current}/joined", 1) == self._nodes.count:
            self._store.compare_set(_ROUNDS, f"{current} {complete}", f"{current} {current}")

    def _has_place(self) -> bool:
        return bool(self._store.get(self._place).decode() == self._name)

    def _rounds(self) -> tuple[int, int]:
        """Return the current round and the last that was complete, 0 if none was."""
        current, complete = self._store.get(_ROUNDS).split()
        return int(current), int(complete)

    def _joined(self) -> int:
        return int(self._store.add(f"{self._round}/joined", 0))

    def num_nodes_waiting(self) -> int:
        """Return 1 if a node waits in a later round: the ranks of this node have to be restarted too. Asks at most once a second."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked, (self._newest, _) = time.monotonic(), self._rounds()
        return int(self._newest > self._round)

    def is_closed(self) -> bool:
        return bool(self._store.check([_CLOSED]))

    def set_closed(self) -> None:
        self._store.set(_CLOSED, "1")

    def shutdown(self) -> bool:
        """End the job for all nodes, unless another agent has this one's place. Returns False if the store is gone."""
        try:
            if self._has_place():
                self.set_closed()
        except (DistError, RuntimeError):
            return False
        return True

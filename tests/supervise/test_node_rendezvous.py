"""The agents of all nodes meet by their index: what each says does not grow with their number, and a failure reaches every node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from argosy.supervise import node_rendezvous
from argosy.supervise.node_rendezvous import NodeRendezvous, Place, PlaceTakenError
from argosy.supervise.world import Nodes


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "_WAIT_S", 0.001)
    monkeypatch.setattr(node_rendezvous, "LOOK_S", 0.0)


def agents_of(store: HashStore, count: int, wait_s: float = 60.0) -> list[NodeRendezvous]:
    return [NodeRendezvous(store, Nodes(index, count, "127.0.0.1", 1), wait_s, Place()) for index in range(count)]


def together(works: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(works)

    def work(place: int) -> None:
        found[place] = works[place]()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_node_keeps_its_index_and_all_find_the_same_address() -> None:
    met = together([agent.next_rendezvous for agent in agents_of(HashStore(), 5)])
    assert [(info.rank, info.world_size) for info in met] == [(index, 5) for index in range(5)]
    assert len({(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in met}) == 1


def test_the_store_of_the_ranks_listens_before_they_start_and_is_new_in_every_round() -> None:
    """A port that was free and is not held yet may be taken by any process before rank 0 listens there."""
    agents = agents_of(HashStore(), 2)
    assert agents[0].use_agent_store, "else rank 0 would listen at the port itself"
    seen = []
    for _ in range(2):
        met = together([partial(settle, agent, agents) for agent in agents])
        where = met[1].bootstrap_store_info
        # As torch opens it in a rank.
        store = TCPStore(
            where.master_addr, where.master_port, world_size=2, is_master=False, timeout=timedelta(minutes=2)
        )
        seen.append(store.add("of this round", 1))
    assert seen == [1, 1]


def test_what_a_node_adds_to_the_store_does_not_grow_with_their_number() -> None:
    keys = []
    for count in (4, 12):
        store = HashStore()
        together([agent.next_rendezvous for agent in agents_of(store, count)])
        keys.append(store.num_keys())
    assert keys[1] - keys[0] == 8 * 2


def settle(agent: NodeRendezvous, agents: list[NodeRendezvous], quit_s: float = 30.0) -> Any:
    """Join, and follow the others, as an agent does while its ranks run, until all are in one round."""
    info = agent.next_rendezvous()
    deadline = time.monotonic() + quit_s
    while len({each._round for each in agents}) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
        if agent.num_nodes_waiting():
            info = agent.next_rendezvous()
    return info


def follow(agent: NodeRendezvous) -> Any:
    while not agent.num_nodes_waiting():
        time.sleep(0.001)
    return agent.next_rendezvous()


def test_a_node_that_fails_takes_all_others_into_the_next_round() -> None:
    agents = agents_of(HashStore(), 3)
    together([agent.next_rendezvous for agent in agents])
    assert [agent.num_nodes_waiting() for agent in agents] == [0, 0, 0]
    met = together([agents[1].next_rendezvous, partial(follow, agents[0]), partial(follow, agents[2])])
    assert [info.rank for info in met] == [1, 0, 2]
    assert [agent.num_nodes_waiting() for agent in agents] == [0, 0, 0]


def test_a_new_agent_of_a_lost_node_and_the_waiting_ones_come_to_one_round() -> None:
    for _ in range(20):
        store = HashStore()
        agents = agents_of(store, 3)
        with pytest.raises(RendezvousTimeoutError):
            NodeRendezvous(store, agents[1]._nodes, 0.0, Place()).next_rendezvous()
        # The lost node has joined the first round, so the two others may complete it before the new agent comes.
        agents[1] = NodeRendezvous(store, agents[1]._nodes, 60.0, Place())
        met = together([partial(settle, agent, agents) for agent in agents])
        assert [info.rank for info in met] == [0, 1, 2]
        assert {agent._round for agent in agents} == {2}


def test_of_two_agents_with_one_index_the_newer_has_the_place() -> None:
    store, place = HashStore(), Place()
    agents = [agents_of(store, 2)[0], NodeRendezvous(store, Nodes(1, 2, "127.0.0.1", 1), 60.0, place)]
    together([agent.next_rendezvous for agent in agents])
    newer = NodeRendezvous(store, agents[1]._nodes, 60.0, Place())
    met = together([newer.next_rendezvous, partial(follow, agents[0])])
    assert [info.rank for info in met] == [1, 0]
    assert agents[1].num_nodes_waiting()
    with pytest.raises(PlaceTakenError, match="another agent has joined as node 1"):
        agents[1].next_rendezvous()
    # Nor can it end the job, or take its place again when it has lost the store and comes back.
    agents[1].shutdown()
    assert not newer.is_closed()
    with pytest.raises(PlaceTakenError):
        NodeRendezvous(store, agents[1]._nodes, 60.0, place).next_rendezvous()
    assert [agent.num_nodes_waiting() for agent in (newer, agents[0])] == [0, 0]
    # An agent that comes back to a store that has forgotten all takes its place.
    assert NodeRendezvous(HashStore(), agents[1]._nodes, 60.0, place)._has_place()


def test_nodes_that_do_not_come_are_counted_and_a_job_that_ended_is_not_joined() -> None:
    store = HashStore()
    agents = agents_of(store, 3, 0.05)
    with pytest.raises(RendezvousTimeoutError, match="1 of 3 nodes have come"):
        agents[2].next_rendezvous()
    assert agents[0].shutdown()
    with pytest.raises(RendezvousClosedError):
        agents[1].next_rendezvous()
    # A new agent of node 0 begins anew.
    agents_of(store, 3)
    assert not agents[1].is_closed()

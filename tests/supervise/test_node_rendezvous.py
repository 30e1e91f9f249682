"""The agents of all nodes meet by their index: what each says does not grow with their number, and a failure reaches every node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from argosy.supervise import node_rendezvous
from argosy.supervise.node_rendezvous import NodeRendezvous
from argosy.supervise.world import Nodes


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "_WAIT_S", 0.001)
    monkeypatch.setattr(node_rendezvous, "LOOK_S", 0.0)


def agents_of(store: HashStore, count: int, wait_s: float = 60.0) -> list[NodeRendezvous]:
    return [NodeRendezvous(store, Nodes(index, count, "127.0.0.1", 1), wait_s) for index in range(count)]


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


def test_each_node_adds_one_key_to_the_store() -> None:
    keys = []
    for count in (4, 12):
        store = HashStore()
        together([agent.next_rendezvous for agent in agents_of(store, count)])
        keys.append(store.num_keys())
    assert keys[1] - keys[0] == 8


def test_a_node_that_fails_takes_all_others_into_the_next_round() -> None:
    agents = agents_of(HashStore(), 3)
    together([agent.next_rendezvous for agent in agents])
    assert [agent.num_nodes_waiting() for agent in agents] == [0, 0, 0]

    def follow(agent: NodeRendezvous) -> Any:
        while not agent.num_nodes_waiting():
            pass
        return agent.next_rendezvous()

    met = together([agents[1].next_rendezvous, *(lambda a=agent: follow(a) for agent in (agents[0], agents[2]))])
    assert [info.rank for info in met] == [1, 0, 2]
    assert [agent.num_nodes_waiting() for agent in agents] == [0, 0, 0]


def test_a_new_agent_of_a_lost_node_opens_a_round_that_the_waiting_ones_join() -> None:
    store = HashStore()
    agents = agents_of(store, 3)
    with pytest.raises(RendezvousTimeoutError):
        agents_of(store, 3, 0.0)[1].next_rendezvous()
    met = together([agents[0].next_rendezvous, agents_of(store, 3)[1].next_rendezvous, agents[2].next_rendezvous])
    assert [info.rank for info in met] == [0, 1, 2]


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

"""Faults of nodes: two agents on this machine, one of which is lost, late or absent."""

from __future__ import annotations

import time

from argosy.errors import EXIT_RESUMABLE
from faults.bench import Bench, Outcome, Run
from ports import free_port


def _environments() -> list[dict[str, str]]:
    port = free_port()
    return [
        {"PET_NNODES": "2", "PET_NODE_RANK": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for n in (0, 1)
    ]


def _lost(bench: Bench, node: int) -> Outcome:
    """A node and all its processes die. When it is back, the run resumes from its last checkpoint."""
    nodes = _environments()
    with bench.run(f"node-{node}-lost", env=nodes[0], ranks=1) as first:
        other = Run(first.root, first.spec)
        other.start("--nproc", "1", env=nodes[1])
        try:
            first.wait_step(13)
            lost = (first, other)[node]
            step, at = first.newest(), time.time()
            assert lost.process is not None
            lost.process.kill()
            lost.wait()
            lost.start("--nproc", "1", env=nodes[node])
            assert (first.wait(), other.wait()) == (0, 0), first.said + other.said
            assert first.result() == bench.undisturbed()
            resumed = next(e for e in first.events("resume") if e["time"] > at)
            return Outcome("came back, bit-equal", None, resumed["time"] - at, step - resumed["step"])
        finally:
            other.end()


def second_node_lost(bench: Bench) -> Outcome:
    return _lost(bench, 1)


def first_node_lost(bench: Bench) -> Outcome:
    """The node that hosts the rendezvous is lost."""
    return _lost(bench, 0)


def node_late(bench: Bench) -> Outcome:
    nodes = _environments()
    with bench.run("node-late", env=nodes[1], ranks=1) as late:
        # The rendezvous host is not there yet.
        time.sleep(5)
        other = Run(late.root, late.spec)
        other.start("--nproc", "1", env=nodes[0])
        try:
            assert (late.wait(), other.wait()) == (0, 0), late.said + other.said
            assert late.result() == bench.undisturbed()
            return Outcome("waited for it")
        finally:
            other.end()


def node_absent(bench: Bench) -> Outcome:
    nodes = _environments()
    with bench.run("node-absent", env=nodes[0], ranks=1, fault={"nodes_wait": "3s"}) as run:
        started = time.time()
        assert run.wait() == EXIT_RESUMABLE, run.said
        assert "did not find each other" in run.said
        assert "node 0" in run.said
        return Outcome("exit 75, says who is missing", detected_s=time.time() - started)

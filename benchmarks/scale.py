"""A benchmark of what grows with the number of ranks, on one machine: layouts, save plans, the rendezvous of nodes, and what watches a run.

    python benchmarks/scale.py                          every part, up to 16,384 ranks and 512 nodes
    python benchmarks/scale.py --short                  a few minutes of two cores
    python benchmarks/scale.py layout checkpoint connections nodes record     some of the parts

Ranks are fake: one process is one rank of any number (layout), takes the part of all of them in turn (checkpoint), or runs the agents
of all nodes in threads against the real store (nodes). docs/scale.md has the results.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SHORT = "--short" in sys.argv
LAYOUTS = [
    (8, "dp_shard=8"),
    (512, "dp_shard=64 tp=8"),
    (4096, "pp=8 tp=8 dp_shard=64"),
    (4096, "dp_shard=4096"),
    (16384, "pp=8 tp=8 dp_shard=256"),
    (16384, "dp_replicate=16 dp_shard=1024"),
]
NODES = [8, 64, 512]
RANKS = [8, 512, 4096]


@contextmanager
def timed(label: str) -> Iterator[None]:
    started, cpu = time.perf_counter(), time.process_time()
    yield
    print(
        f"  {label:<58} {time.perf_counter() - started:8.2f} s, {time.process_time() - cpu:7.2f} s of CPU", flush=True
    )


def memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB at most"


def spec_of(layout: str) -> Any:
    from argosy.config.resolve import resolve

    parallel = {key: int(value) for key, value in (pair.split("=") for pair in layout.split())}
    sections = {"data": {"train": "none", "tokenizer": "none"}, "train": {"global_batch": 16384, "steps": 10}}
    model = {"preset": "gpt3-175b", "layers": 8} if SHORT else "gpt3-175b"
    return resolve(
        {"name": "scale", "model": model, "optim": {"lr": 1e-4}, "parallel": parallel | {"micro_batch": 1}, **sections}
    ).spec


def layout() -> None:
    """Build the mesh and one rank of each layout, with the model on the meta device."""
    import torch

    from argosy.compat.absent_peers import fake_ranks
    from argosy.measure.rehearsal import hold
    from argosy.parallel.mesh import make_mesh

    for ranks, name in LAYOUTS[:: 3 if SHORT else 1]:
        spec = spec_of(name)
        with fake_ranks(ranks - 1, ranks):
            with timed(f"{ranks:>6} ranks, {name}: mesh"):
                mesh = make_mesh(spec.parallel, torch.device("meta"))
            with timed(f"{'':>6} a rank's part of the model and the optimiser"):
                hold(spec, mesh)
        print(f"  {'':>6} {memory()}")


def _described(layout: str, rank: int, ranks: int) -> bytes:
    """Return what a rank says about its tensors. A child process builds it: torch keeps the groups of one fake rank for the next."""
    import torch

    from argosy.checkpoint.save_plan import describe
    from argosy.compat.absent_peers import fake_ranks
    from argosy.parallel.mesh import make_mesh
    from argosy.parallel.parallelize import parallelize
    from argosy.train.optimizer import Optimizer
    from argosy.train.session import parameter_names

    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        spec = spec_of(layout)
        with fake_ranks(rank, ranks), os.fdopen(writer, "wb") as file:
            names = parameter_names(spec) if spec.parallel.pp > 1 else None
            optimizer = Optimizer(
                parallelize(spec, make_mesh(spec.parallel, torch.device("meta"))).model, spec.optim, names=names
            )
            file.write(describe({"weights": optimizer.weights(), "optimizer": optimizer.tensors()}))
            file.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = file.read()
    os.wait()
    return found


def checkpoint() -> None:
    """Plan a save: the messages of all ranks along their tree, the work of the first rank, and that of one rank."""
    from argosy.checkpoint.save_plan import assign_writers, claim, merge_claims
    from argosy.checkpoint.stored import index_of, read_index
    from argosy.parallel.host_group import children

    for ranks, name in LAYOUTS[1 :: 2 if SHORT else 1]:
        every = ranks // spec_of(name).parallel.pp
        stages = [_described(name, rank, ranks) for rank in range(0, ranks, every)]
        largest = 0

        def merged(rank: int, ranks: int = ranks, stages: list[bytes] = stages) -> bytes:
            nonlocal largest
            mine = claim(stages[rank * len(stages) // ranks], rank)
            found = merge_claims([mine, *(merged(child) for child in children(rank, ranks))])
            largest = max(largest, len(found))
            return found

        print(f"  {ranks:>6} ranks, {name}: the first talks to {len(children(0, ranks))}")
        with timed(f"{'':>6} messages of all ranks, merged one after the other"):
            claims = merged(0)
        with timed(f"{'':>6} the first rank chooses the writers"):
            index = index_of(assign_writers(claims), ranks)
        with timed(f"{'':>6} a rank finds its slices"):
            _, tensors = read_index(index)
            mine = [box for group in tensors.values() for one in group.values() for box in _held(one, ranks - 1)]
        print(
            f"  {'':>6} largest message {largest:,} bytes, tensors.json {len(index):,} bytes, {len(mine):,} slices a rank"
        )


def _held(one: Any, rank: int) -> list[Any]:
    inside = any(first <= rank < last for first, last in one.spread.grid.ranges)
    return one.spread.chunks_of(rank) if inside else []


def everywhere(count: int, work: Callable[[int], None]) -> None:
    """Run the work of every node or rank in a thread."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def nodes() -> None:
    """Let the agents of all nodes meet, then let one of them fail: how long until every node is told, and all have met again."""
    # Without names for 127.0.0.1, torch warns of every connection. It reads this once, while it loads.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from argosy.supervise.node_rendezvous import LOOK_S, NodeRendezvous, Place, open_store
    from argosy.supervise.world import Nodes

    for count in NODES[: 2 if SHORT else None]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        places = [Nodes(index, count, "127.0.0.1", port) for index in range(count)]
        agents: dict[int, Any] = {}

        def connect(index: int, places: list[Nodes] = places, agents: dict[int, Any] = agents) -> None:
            if index not in agents:
                agents[index] = NodeRendezvous(open_store(places[index], 600.0), places[index], 600.0, Place())

        connect(0)
        with timed(f"{count:>6} nodes connect to the store of node 0"):
            everywhere(count, connect)
        with timed(f"{'':>6} all have joined"):
            everywhere(count, lambda index, agents=agents: agents[index].next_rendezvous())
        told: list[float] = []
        failed_at = time.perf_counter()

        def restart(
            index: int, agents: dict[int, Any] = agents, told: list[float] = told, at: float = failed_at
        ) -> None:
            while index != len(agents) - 1 and not agents[index].num_nodes_waiting():
                time.sleep(0.1)
            told.append(time.perf_counter() - at)
            agents[index].next_rendezvous()

        with timed(f"{'':>6} the last node fails, and all have joined again"):
            everywhere(count, restart)
        print(
            f"  {'':>6} a node was told after {statistics.median(told):.2f} s, the last after {max(told):.2f} s; each asks every {LOOK_S:g} s"
        )


def connections() -> None:
    """Let ranks, as threads, make a group of gloo and use it as training does; TORCH_GLOO_LAZY_INIT=0 connects all of them at once."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    for ranks in (16, 32, 64):
        store, before = dist.HashStore(), len(os.listdir("/proc/self/fd"))
        groups: dict[int, Any] = {}

        def make(rank: int, store: Any = store, groups: dict[int, Any] = groups, ranks: int = ranks) -> None:
            groups[rank] = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=300))

        def agree(rank: int, groups: dict[int, Any] = groups) -> None:
            groups[rank].allreduce([torch.ones(3, dtype=torch.float64)]).wait()
            groups[rank].broadcast([torch.ones(100)]).wait()

        for label, work in (("make a group", make), ("agree and broadcast once", agree)):
            with timed(f"{ranks:>6} ranks {label}"):
                everywhere(ranks, work)
        print(f"  {'':>6} {(len(os.listdir('/proc/self/fd')) - before) / ranks:.1f} files a rank")


def record() -> None:
    """Log the ranks of a step as the first rank does, and ask the dashboard about a run of as many ranks."""
    import random

    from argosy.record.jsonl import now
    from argosy.record.rank_columns import COLUMNS, Ranks

    for ranks in RANKS[: 2 if SHORT else None]:
        rows = [[random.uniform(0.9, 1.1) for _ in COLUMNS] for _ in range(ranks)]
        with timed(f"{ranks:>6} ranks: their numbers become a line of ranks.jsonl, 20 times"):
            for step in range(20):
                found = Ranks.of(rows, step=step, time=now(), stages=1)
                found.summary()
                line = orjson.dumps(found.line(), option=orjson.OPT_SERIALIZE_NUMPY)
        print(f"  {'':>6} {len(line):,} bytes a line")
        with tempfile.TemporaryDirectory() as folder:
            _make_run(Path(folder) / "wide", ranks, line)
            _ask(Path(folder), ranks)


def _make_run(run: Path, ranks: int, line: bytes) -> None:
    from record.run_dirs import record as metrics

    (run / "heartbeat").mkdir(parents=True)
    (run / "logs" / "0").mkdir(parents=True)
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(metrics(step)) + b"\n" for step in range(1, 2000)))
    (run / "events.jsonl").write_bytes(orjson.dumps({"event": "start", "step": 0, "time": time.time()}) + b"\n")
    (run / "ranks.jsonl").write_bytes((line + b"\n") * 50)
    for rank in range(ranks):
        beat = {
            "rank": rank, "host": f"node{rank // 8}", "pid": 4711 + rank, "attempt": 0, "step": 1999, "phase": "forward_backward",
            "phase_s": 0.8, "longest_s": 0.9, "progress": 3251, "state": "R", "memory_bytes": 2.1e9, "collective": None,
            "time": time.time(), "monotonic": time.monotonic(), "beat": 640, "alive": True,
        }  # fmt: skip
        (run / "heartbeat" / f"{rank}.json").write_bytes(orjson.dumps(beat))
        (run / "logs" / "0" / f"{rank}.log").write_text(f"rank {rank} began\n" + "a line of the log\n" * 20)
    for step in (500, 1000, 1500):
        directory = run / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        names = [
            f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"
            for group in ("weights", "optimizer")
            for rank in range(ranks)
        ]
        for name in names:
            (directory / name).write_bytes(b"x")
        files = {name: {"bytes": 1, "blake3": "0" * 64} for name in names}
        manifest = {"format": "argosy-checkpoint", "version": 3, "step": step, "files": files}
        (directory / "manifest.json").write_bytes(orjson.dumps(manifest))


def _ask(root: Path, ranks: int) -> None:
    import httpx

    from watch.conftest import TOKEN, Dashboard

    dashboard = Dashboard(root)
    with httpx.Client(base_url=dashboard.address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120) as http:
        for path in ("runs", "run", "ranks", "verdict", "log"):
            times, cpu = [], []
            for _ in range(10):
                started, used = time.perf_counter(), time.process_time()
                http.get(f"/api/{path}", params={"run": "wide", "rank": ranks - 1}).raise_for_status()
                times.append(1000 * (time.perf_counter() - started))
                cpu.append(1000 * (time.process_time() - used))
            told = f"first {times[0]:6.0f} ms, median {statistics.median(times):6.0f} ms; CPU {cpu[0]:6.0f} and {statistics.median(cpu):6.0f} ms"
            print(f"  {'':>6} /api/{path:<12} {told}", flush=True)


PARTS = {part.__name__: part for part in (layout, checkpoint, connections, nodes, record)}


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asked = [word for word in sys.argv[1:] if word in PARTS] or list(PARTS)
    print(f"{os.cpu_count()} cores, {' '.join(sys.argv[1:]) or 'all parts'}")
    for name in asked:
        print(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}")
        PARTS[name]()


if __name__ == "__main__":
    main()

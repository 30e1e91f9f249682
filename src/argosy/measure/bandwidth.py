"""All-reduce bandwidth between ranks: of all nodes, and of pairs of nodes; and the transport that NCCL chose.

Bus bandwidth is 2 (n - 1) / n x bytes / time for n ranks: the load of the slowest link, comparable for any n.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from argosy.compat.messages import refuse_pickled_messages
from argosy.parallel.host_group import all_gather_json
from argosy.supervise.world import World

_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
_ROUNDS = 5


def probe(world: World, ranks_per_node: int, report: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return every node's report and the measured bandwidths. A collective: all ranks call it and get the same result."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"argosy-nccl-{os.getpid()}.log"
    if cuda:
        torch.cuda.set_device(device)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(log)}
    if world.size == 1:
        nodes = {socket.gethostname(): list(report)}
        return {"nodes": nodes, "measured": [], "transport": None, "collnet": False, "topology": None}
    os.environ.setdefault("MASTER_ADDR", world.address)
    os.environ.setdefault("MASTER_PORT", str(world.port))
    refuse_pickled_messages()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=world.rank, world_size=world.size)
    try:
        gathered = all_gather_json({"host": socket.gethostname(), "report": list(report)})
        hosts = [entry["host"] for entry in gathered[::ranks_per_node]]
        names = [f"{host}#{n}" if hosts.count(host) > 1 else host for n, host in enumerate(hosts)]
        nodes = {name: gathered[n * ranks_per_node]["report"] for n, name in enumerate(names)}
        measured = _measure(world, ranks_per_node, names, device)
        nccl_log = _read(log)
        return {
            "nodes": nodes,
            "measured": measured,
            "transport": _transport(nccl_log),
            "topology": _topology(nccl_log),
            "collnet": re.search(r"connected collnet", nccl_log, re.IGNORECASE) is not None,
        }
    finally:
        dist.destroy_process_group()
        log.unlink(missing_ok=True)


def _measure(world: World, per_node: int, names: list[str], device: torch.device) -> list[tuple[str, float]]:
    count = len(names)
    found = [(" + ".join(names), _bus_bandwidth(None, world.size, device))]
    pairs = [(a, a + 1) for first in (0, 1) for a in range(first, count - 1, 2)] if count > 2 else []
    # Pairs of neighbours: a node that is slow with both of its neighbours is the slow one.
    for left, right in pairs:
        ranks = [node * per_node + n for node in (left, right) for n in range(per_node)]
        group = dist.new_group(ranks)
        rate = _bus_bandwidth(group, len(ranks), device) if world.rank in ranks else 0.0
        rates = all_gather_json({"rate": rate})
        found.append((f"{names[left]} + {names[right]}", max(entry["rate"] for entry in rates)))
    return found


def _bus_bandwidth(group: dist.ProcessGroup | None, ranks: int, device: torch.device) -> float:
    """Return the best bus bandwidth of a few rounds, in GB/s."""
    tensor = torch.zeros(_BYTES[device.type] // 4, device=device)
    dist.all_reduce(tensor, group=group)
    best = float("inf")
    for _ in range(_ROUNDS):
        _wait(device)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * (ranks - 1) / ranks * tensor.numel() * 4 / best / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        # Without a GPU there is no NCCL log.
        return ""


def _transport(nccl_log: str) -> str | None:
    found = re.findall(r"Using network (\S+(?: \S+)?)", nccl_log)
    return str(found[-1]) if found else None


def _topology(nccl_log: str) -> str | None:
    found = re.search(r"NCCL_TOPO_FILE set by environment to (\S+)", nccl_log)
    return None if found is None else found[1]

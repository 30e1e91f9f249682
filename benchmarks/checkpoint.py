"""A benchmark of checkpoints: how long a save stalls training, bytes written, write speed, and the time of a check and of a load.

    python benchmarks/checkpoint.py [--millions 1000] [--dir /tmp]

It compares with torch.save, torch's distributed checkpoint (DCP) and dd, on one disk in one run. The state is fp32 weights and
AdamW's two moments, as in a run on a CPU. If the state and a copy do not fit into free memory, the model is made smaller, and the
output says so. `sync` runs before each measurement, so that no measurement pays for earlier writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from argosy.checkpoint.manifest import OPTIMIZER, WEIGHTS, TrainProgress, verify
from argosy.checkpoint.save import Snapshot, contents, write
from argosy.checkpoint.save_plan import make_plan
from argosy.checkpoint.store import load_into
from argosy.checkpoint.stored import StoredTensors
from argosy.parallel.host_group import ALONE

Groups = dict[str, dict[str, torch.Tensor]]
# Alternating rounds of dd and of Argosy; the best of each counts.
ROUNDS = 3
HIDDEN = 2048
# Parameters of a layer, in matrices of four shapes.
LAYER = 12 * HIDDEN * HIDDEN


def state_of(millions: int) -> Groups:
    layers = max(1, round(millions * 1e6 / LAYER))
    shapes = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "up": (4 * HIDDEN, HIDDEN),
        "down": (HIDDEN, 4 * HIDDEN),
    }
    weights = {f"layers.{i}.{n}.weight": torch.full(shape, 0.5) for i in range(layers) for n, shape in shapes.items()}
    moments = {
        f"{kind}/{n}": torch.full_like(w, 0.25) for kind in ("exp_avg", "exp_avg_sq") for n, w in weights.items()
    }
    return {WEIGHTS: weights, OPTIMIZER: moments}


def available() -> float:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return float(text.split("MemAvailable:")[1].split()[0]) * 1024


def timed(work: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def size_of(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def ours(groups: Groups, root: Path, snapshot: Snapshot) -> dict[str, float]:
    """Measure one save: the copy, which stalls training, and the write in the background."""
    plan = make_plan(groups, ALONE)
    os.sync()
    started = time.perf_counter()
    files = snapshot.take(contents(plan, groups, ALONE))
    stall = time.perf_counter() - started
    thread = threading.Thread(target=write, args=(root, TrainProgress(1, 1), files, plan, ALONE))
    started = time.perf_counter()
    thread.start()
    thread.join()
    return {"stall_s": stall, "write_s": time.perf_counter() - started, "bytes": size_of(root)}


def load(path: Path, groups: Groups) -> None:
    """Fill the state again, from files that the check before has read."""
    for group, tensors in groups.items():
        load_into(StoredTensors(path, group), tensors, path)


def turns(start: Callable[[], Callable[[], bool]]) -> float:
    """Return iterations per second of a pure-Python loop while background work runs. It is slow if that work holds the GIL."""
    going_on = start()
    started, count = time.perf_counter(), 0
    while going_on():
        count += 1
    return count / (time.perf_counter() - started)


def in_thread(work: Callable[[], object]) -> Callable[[], bool]:
    thread = threading.Thread(target=work)
    thread.start()
    return thread.is_alive


def in_process(work: Callable[[], object]) -> Callable[[], bool]:
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return lambda: os.waitpid(child, os.WNOHANG)[0] == 0


def measure(millions: int, directory: Path) -> dict[str, Any]:
    groups = state_of(millions)
    size = sum(t.nbytes for tensors in groups.values() for t in tensors.values())
    root, snapshot = directory / "argosy", Snapshot()
    found: dict[str, Any] = {"parameters": sum(t.numel() for t in groups[WEIGHTS].values()), "state_bytes": size}

    def dd(flags: str) -> float:
        command = ["dd", "if=/dev/zero", f"of={directory / 'dd'}", "bs=16M", f"count={size >> 24}", *flags.split()]
        return timed(lambda: subprocess.run(command, check=True, capture_output=True))

    snapshot.prepare(contents(make_plan(groups, ALONE), groups, ALONE))
    # The training time before a first save.
    time.sleep(size / 0.3e9)
    found["first"] = ours(groups, root, snapshot)
    shutil.rmtree(root)
    rounds = []
    for _ in range(ROUNDS):
        found["dd_s"] = min(found.get("dd_s", 1e9), dd("conv=fsync"))
        (directory / "dd").unlink()
        rounds.append(ours(groups, root, snapshot))
        found["verify_s"] = timed(lambda: verify(root / "step-00000001"))
        found["load_s"] = timed(lambda: load(root / "step-00000001", groups))
        shutil.rmtree(root)
    found["argosy"] = {key: min(one[key] for one in rounds) for key in rounds[0]}
    plan = make_plan(groups, ALONE)
    staged = snapshot.take(contents(plan, groups, ALONE))
    for step, (kind, start) in enumerate((("thread", in_thread), ("process", in_process)), 1):
        os.sync()
        found[f"turns_per_s_beside_{kind}"] = turns(
            partial(start, partial(write, root, TrainProgress(step, 1), staged, plan, ALONE))
        )
    shutil.rmtree(root)
    del staged, snapshot
    flat = {f"{group}.{name}": t for group, tensors in groups.items() for name, t in tensors.items()}
    found["torch_save_s"] = timed(lambda: torch.save(flat, directory / "torch.pt"))
    (directory / "torch.pt").unlink()
    found["dcp_s"] = timed(lambda: dcp.save(flat, checkpoint_id=directory / "dcp"))
    found["dcp_bytes"] = size_of(directory / "dcp")
    shutil.rmtree(directory / "dcp")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=1000, help="parameters")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    options = parser.parse_args()
    # 12 bytes per parameter, and a copy.
    most = int(available() * 0.8 / (2 * 12) / 1e6)
    millions = min(options.millions, most)
    if millions < options.millions:
        print(
            f"only {available() / 2**30:.1f} GiB of memory are free: {millions} M parameters instead of {options.millions} M"
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        found = measure(millions, Path(directory))
    dist.destroy_process_group()
    print(json.dumps(found, indent=2))
    argosy, dd = found["argosy"], found["dd_s"]
    print(f"stall / DCP's sync save   {argosy['stall_s'] / found['dcp_s']:.3f}   (limit 0.25)")
    print(f"stall / torch.save        {argosy['stall_s'] / found['torch_save_s']:.3f}")
    print(f"bytes / state             {argosy['bytes'] / found['state_bytes']:.5f} (limit 1.02)")
    print(f"write speed / dd          {dd / argosy['write_s']:.3f}   (limit 0.8)")


if __name__ == "__main__":
    main()

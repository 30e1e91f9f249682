"""Ranks of large jobs on one GPU: what they take and hold against the planner, and against the same ranks of a real job.

    python benchmarks/rehearsal.py                 both tables
    python benchmarks/rehearsal.py plan [CASE …]   ranks of 7B to 175B models: measured against planned time on the GPU and memory
    python benchmarks/rehearsal.py memory [CASE …] two NCCL ranks on this GPU: their memory against that of the rehearsal
    python benchmarks/rehearsal.py planned         the planner's figures for an H200; needs no GPU

Every case is a process of its own, with a time limit: one that fails is reported, and the others go on. `--json FILE` writes all
figures. The two NCCL ranks claim different hosts and talk over loopback sockets; their memory is that of real ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

PLANNED_ON = "H200"
MEMORY_BAR, COMPUTE_BAR, SAME_BAR = 0.05, 0.08, 0.03
LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """One rank of a job. `keys` are overrides of the run spec."""

    model: str
    ranks: int
    keys: str
    batch: int
    micro_batch: int = 1
    seq_len: int = 4096
    rank: int = 0
    # Of those in a step; 0: all.
    micro_batches: int = 0

    def arguments(self) -> list[str]:
        sizes = {"--batch": self.batch, "--micro-batch": self.micro_batch, "--seq-len": self.seq_len}
        return [self.model, *self.overrides(), *(str(part) for option in sizes.items() for part in option)]

    def overrides(self) -> list[str]:
        return [key if "." in key.split("=")[0] else f"parallel.{key}" for key in self.keys.split()]

    def spec(self) -> Any:
        from argosy.config.benchmark import benchmark_spec

        return benchmark_spec(
            self.model, self.overrides(), steps=2, batch=self.batch, micro_batch=self.micro_batch, seq_len=self.seq_len
        )


# World sizes are those of the jobs; batches are small where a step would take long, and large enough to fill the pipeline.
CASES = {
    "7b fsdp": Case("llama2-7b", 8, "dp_shard=8", 16),
    "7b tp fsdp": Case("llama2-7b", 16, "tp=2 dp_shard=8", 32, 2),
    "8b tp dp": Case("llama3-8b", 16, "tp=4 dp_replicate=4", 16, 2),
    "8b cp fsdp 32k": Case("llama3-8b", 32, "cp=4 dp_shard=8 model.max_seq_len=32768", 8, 1, 32768),
    "13b hsdp selective": Case("llama2-13b", 32, "dp_replicate=4 dp_shard=8 recompute=selective", 64),
    "30b tp pp": Case("gpt3-30b", 64, "tp=4 pp=4 dp_replicate=4", 64, 1, 2048, micro_batches=8),
    "70b fsdp full": Case("llama3-70b", 64, "dp_shard=64 recompute=full", 64),
    "70b tp pp first": Case("llama3-70b", 256, "tp=8 pp=4 dp_replicate=8", 256, 1, 4096, micro_batches=8),
    "70b tp pp last": Case("llama3-70b", 256, "tp=8 pp=4 dp_replicate=8", 256, 1, 4096, 192, micro_batches=8),
    "47b moe ep": Case("mixtral-8x7b", 32, "dp_shard=32 ep=8", 64),
    "30b moe ep": Case("qwen3-30b-a3b", 16, "dp_shard=16 ep=8", 32),
    "145b tp pp vpp": Case(
        "gpt3-145.6b", 512, "tp=8 pp=8 vpp=2 schedule=interleaved-1f1b dp_replicate=8", 256, 1, 2048, micro_batches=16
    ),
    "175b tp pp first": Case("gpt3-175b", 1024, "tp=8 pp=16 dp_replicate=8", 512, 1, 2048, micro_batches=16),
    "175b tp pp middle": Case("gpt3-175b", 1024, "tp=8 pp=16 dp_replicate=8", 512, 1, 2048, 520, micro_batches=16),
    "175b tp pp last": Case("gpt3-175b", 1024, "tp=8 pp=16 dp_replicate=8", 512, 1, 2048, 1023, micro_batches=16),
    "175b tp pp zbv": Case("gpt3-175b", 1024, "tp=8 pp=16 vpp=2 schedule=zbv dp_replicate=8", 512, 1, 2048, micro_batches=32),
}  # fmt: skip
# Two ranks share the card.
SMALL = "model.layers=8"
TWINS = {
    "dp": Case("llama3-1b", 2, f"dp_replicate=2 {SMALL}", 8, 2, 2048),
    "fsdp": Case("llama3-1b", 2, f"dp_shard=2 {SMALL}", 8, 2, 2048),
    "tp": Case("llama3-1b", 2, f"tp=2 {SMALL}", 8, 4, 2048),
    "pp": Case("llama3-1b", 2, f"pp=2 {SMALL}", 8, 2, 2048),
    "pp zbv": Case("llama3-1b", 2, f"pp=2 vpp=2 schedule=zbv {SMALL}", 8, 2, 2048),
    "cp": Case("llama3-1b", 2, f"cp=2 {SMALL}", 8, 2, 4096),
    "ep": Case("moe-3.5b-a1.1b", 2, f"dp_shard=2 ep=2 {SMALL}", 8, 2, 2048),
}


def rehearsed(case: Case, rank: str) -> dict[str, Any]:
    """Return what `argosy bench` measures of one rank, or of one rank of each stage."""
    options = ["--world-size", case.ranks, "--rank", rank, "--steps", 2, "--warmup", 1]
    options += ["--micro-batches", case.micro_batches] if case.micro_batches else []
    command = [sys.executable, "-m", "argosy", "bench", *case.arguments(), *map(str, options), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-400:] or f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare_with_plan(case: Case) -> dict[str, Any]:
    found = rehearsed(case, str(case.rank))
    (rank,) = found["ranks"]
    if rank["memory_error"] is None or rank["compute_error"] is None:
        raise RuntimeError(f"the planner does not know {found['device']}: there is nothing to compare")
    step = None if found["plan"] is None else found["plan"]["step_s"]
    return {**rank, "device": found["device"], "torch": found["torch"], "layout": found["layout"], "step_s": step}


def compare_with_real(case: Case) -> dict[str, Any]:
    """Return the peaks of one rank of each stage, in a real job and in the rehearsal, in GiB, and the largest error."""
    peaks = _real_peaks(case)
    rows = rehearsed(case, "all-stages")["ranks"]
    alone = [row["measured"]["memory_gib"]["peak"] for row in rows]
    real = [peaks[row["rank"]] for row in rows]
    errors = [mine / theirs - 1 for mine, theirs in zip(alone, real, strict=True)]
    return {"real_gib": real, "rehearsed_gib": alone, "error": max(errors, key=abs)}


def _real_peaks(case: Case) -> list[float]:
    """Start the ranks of a case on this GPU, and return the peak of each in GiB."""
    name = next(name for name, twin in TWINS.items() if twin is case)
    port = str(20000 + os.getpid() % 20000)
    common = {"WORLD_SIZE": str(case.ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(case.ranks):
        own = {"RANK": str(rank), "NCCL_HOSTID": f"h{rank}"}
        command = [sys.executable, __file__, "rank", name]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **common, **loopback, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )  # fmt: skip
    try:
        ends = [process.communicate(timeout=LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, ends, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank of the real job failed: {errors.strip()[-400:]}")
    return [float(output.split()[-1]) for output, _ in ends]


def run_real_rank(case: Case) -> None:
    """Run steps as one of several NCCL ranks, and print the peak memory in GiB."""
    from argosy.measure.rank_steps import Effort, measure_on
    from argosy.parallel.mesh import joined
    from argosy.supervise.world import find_world
    from argosy.train.device import prepare_device

    spec, world = case.spec(), find_world(os.environ)
    micro_batches = case.batch // (case.micro_batch * spec.parallel.data_parallel)
    with joined(spec.parallel, world, prepare_device(spec.train, local_rank=0)) as mesh:
        print(measure_on(spec, mesh, Effort(2, 1, micro_batches)).memory.peak)


def planned(case: Case) -> dict[str, Any]:
    """Return the planner's figures for a rank, without a GPU."""
    from argosy.measure.rank_steps import stage_of
    from argosy.plan.hardware import parse_cluster
    from argosy.plan.measured_plan import RankPlan

    spec = case.spec()
    plan, stage = RankPlan.of(spec, "bf16"), stage_of(spec, case.rank)
    seconds = plan.compute(stage, parse_cluster(f"{case.ranks}x{PLANNED_ON}"), launches=False)
    return {"memory_gib": plan.memory(stage).as_dict(), "compute_s": seconds.total, "micro_batches": plan.micro_batches}


def told(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{name:<20} FAILED: {found['failed']}"
    if "error" in found:
        pairs = ", ".join(
            f"stage {stage} {real:.3f} GiB real, {alone:.3f} rehearsed"
            for stage, (real, alone) in enumerate(zip(found["real_gib"], found["rehearsed_gib"], strict=True))
        )
        return f"{name:<20} {found['error']:+7.2%}  {pairs}"
    if "measured" not in found:
        need = found["memory_gib"]["device"]
        return f"{name:<20} {need:7.1f} GiB  {found['compute_s']:8.3f} s in {found['micro_batches']} micro-batches"
    measured, plan = found["measured"], found["planned"]
    return (
        f"{name:<20} memory {measured['memory_gib']['peak']:7.2f} GiB, planned {plan['memory_gib']['allocated']:7.2f} "
        f"({found['memory_error']:+6.1%})   on the GPU {measured['device_s']:8.4f} s, planned {plan['device_s']:8.4f} "
        f"({found['compute_error']:+6.1%}), elapsed {measured['compute_s']:8.4f}"
    )


def verdict(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return how many cases of each table are within their bars."""
    lines = []
    done = [one for one in found.get("plan", {}).values() if "failed" not in one]
    for what, bar in (("memory_error", MEMORY_BAR), ("compute_error", COMPUTE_BAR)):
        if done:
            within = sum(abs(one[what]) <= bar for one in done)
            lines.append(f"{what.split('_')[0]} within {bar:.0%} of the plan: {within} of {len(found['plan'])} cases")
    twins = [one for one in found.get("memory", {}).values() if "failed" not in one]
    if twins:
        within = sum(abs(one["error"]) <= SAME_BAR for one in twins)
        lines.append(f"memory within {SAME_BAR:.0%} of a real job: {within} of {len(found['memory'])} cases")
    return lines


TABLES = {"plan": (CASES, compare_with_plan), "memory": (TWINS, compare_with_real), "planned": (CASES, planned)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=[*TABLES, "rank"], help="default: plan, then memory")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all of the table")
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    options = parser.parse_args()
    if options.table == "rank":
        run_real_rank(TWINS[options.cases[0]])
        return
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table in [options.table] if options.table else ["plan", "memory"]:
        cases, compare = TABLES[table]
        for name in options.cases or cases:
            began = time.monotonic()
            try:
                one = compare(cases[name])
            except (RuntimeError, subprocess.TimeoutExpired, ValueError, OSError) as error:
                one = {"failed": str(error)}
            found.setdefault(table, {})[name] = {**one, "seconds": round(time.monotonic() - began, 1)}
            print(told(name, one), flush=True)
            if options.json:
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(found, file, indent=1)
    print("\n".join(verdict(found)))


if __name__ == "__main__":
    main()

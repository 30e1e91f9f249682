"""Runs that were launched, wherever they are: their state, log and end, by a run spec or by a name alone.

Progress comes from the run directory where this machine sees it, and otherwise from the last line about a step in the log.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from argosy.config.resolve import resolve
from argosy.console.formats import clock
from argosy.console.training_lines import STEP_LINE
from argosy.errors import ArgosyError
from argosy.launch.api import Cluster, connect
from argosy.launch.conduct import look, runs_in, selector, stop
from argosy.launch.names import object_name
from argosy.launch.placement import KUBERNETES
from argosy.launch.pod import RANKS, STAGE_LABEL
from argosy.launch.states import State, pod_number
from argosy.record.jsonl import read_metrics
from argosy.record.rank_logs import newest_attempt, pieces, ranks_with_logs, read_log

_TAIL = 200
_LIST = "`argosy ls` lists the runs of a namespace (-n NAMESPACE)"
_WATCH = "`argosy watch {directory}` shows what it does"


@dataclass(frozen=True)
class Launched:
    name: str
    target: str
    namespace: str | None
    directory: Path


def find(run: str, namespace: str | None, target: str | None = None) -> Launched:
    """`run` is a run spec's file, a run directory, or a run's name: then it is looked for in the namespace, or here. `target`: where it was
    launched, if not where its spec says."""
    if run.endswith((".yaml", ".yml")):
        spec = resolve(Path(run), elsewhere=True).spec
        where = target or ("local" if spec.cluster is None else spec.cluster.target)
        space = namespace or (spec.cluster.namespace if spec.cluster is not None else None)
        return Launched(spec.name, where, space, Path(spec.runs_dir) / spec.name)
    directory = Path(run) if "/" in run else Path("runs") / run
    here = directory.is_dir() and namespace is None
    found = Launched(directory.name, target or ("local" if here else "jobset"), namespace, directory)
    if target is None and not here and "/" in run:
        raise _unknown(found, f"there is no run directory {directory}")
    if target is None and not here and find_spec("kubernetes") is None:
        client = "its client: pip install 'argosy[k8s]'"
        raise _unknown(found, f"there is no {directory} here, and asking Kubernetes for {run} needs {client}")
    return found


def status(run: Launched) -> dict[str, Any]:
    """State of every stage, and how far training is."""
    if run.target in KUBERNETES:
        cluster = _cluster(run)
        found = runs_in(cluster).get(run.name)
        if found is None:
            raise _unknown(run, f"namespace {cluster.namespace} has no run {run.name}")
        states = {
            stage: look(cluster, run.name, stage)
            for stage in ("fetch", "prepare", "preflight", "train")
            if stage in found
        }
        return {"run": run.name, "namespace": cluster.namespace, "stages": states, "progress": progress(run, cluster)}
    if run.target == "slurm":
        return {"run": run.name, "namespace": None, "stages": _slurm_states(run), "progress": progress(run, None)}
    return {"run": run.name, "namespace": None, "stages": {}, "progress": progress(run, None)}


def progress(run: Launched, cluster: Cluster | None) -> str | None:
    metrics = run.directory / "metrics.jsonl"
    if metrics.exists():
        records = [record for record in read_metrics(metrics).values() if "loss" in record and "eta_s" in record]
        last = records[-1] if records else None
        if last is not None:
            return f"step {last['step']}/{last['steps']}, loss {last['loss']:.4f}, ETA {clock(last['eta_s'])}"
    if cluster is None:
        return None
    first = [pod["metadata"]["name"] for pod in _pods(cluster, run.name) if pod_number(pod) == 0][-1:]
    lines = [line for pod in first for line in cluster.logs(pod, tail=_TAIL)]
    told = [line for line in lines if re.search(STEP_LINE, line)]
    return None if not told else told[-1].partition(" ")[2].strip()


def logs(run: Launched, *, rank: int, follow: bool, tail: int | None) -> Iterator[str]:
    """Of the pod that holds a rank; elsewhere that of the rank itself, from the run directory. A lost connection is taken up again
    where it broke off."""
    if run.target not in KUBERNETES:
        if not follow:  # it may yet begin
            _require_log(run, rank)
        yield from read_log(run.directory, rank, tail=tail, follow=follow)
        return
    cluster = _cluster(run)
    since, seen = None, set[str]()
    while True:
        last = (
            not follow or look(cluster, run.name, "train").over
        )  # asked before reading: the end may come while we read
        if not last and not _pods(cluster, run.name) and run.name in runs_in(cluster):
            time.sleep(1.0)  # it waits for nodes, or in a queue; `argosy status` says which
            continue
        pod = _pod_of(run, cluster, rank)
        for line in cluster.logs(pod, follow=follow, tail=tail if since is None else None, since=since):
            stamp, _, text = line.partition(" ")
            if stamp != since:
                since, seen = stamp, set()
            if text not in seen:  # the second the connection broke off in comes again
                seen.add(text)
                yield text
        if last:
            return
        time.sleep(1.0)


def _require_log(run: Launched, rank: int) -> None:
    attempt = newest_attempt(run.directory)
    if attempt is None:
        raise _unknown(run, f"{run.directory} has no logs of ranks: it has not begun, or is not seen from here", _WATCH)
    if not pieces(attempt, rank):
        others = ranks_with_logs(attempt)
        held = f"those of {len(others)} ranks, the last of them {others[-1]}" if others else "none"
        raise _unknown(run, f"{attempt} has no log of rank {rank}, but {held}", "give another --rank")


def _pod_of(run: Launched, cluster: Cluster, rank: int) -> str:
    """Of the newest pods of the stage that runs: each says how many ranks it holds."""
    pods = _pods(cluster, run.name)
    if not pods:
        raise _unknown(run, f"namespace {cluster.namespace} has no pod of {run.name}")
    by_number = {pod_number(pod): pod for pod in pods}
    ranks = int(pods[0]["metadata"].get("annotations", {}).get(RANKS, 1))
    pod = by_number.get(rank // ranks)
    if pod is None:
        held = f"{len(by_number)} pod{'s' if len(by_number) > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
        raise _unknown(run, f"{run.name} has {held}, and none holds rank {rank}")
    return str(pod["metadata"]["name"])


def end(run: Launched) -> list[str]:
    if run.target == "slurm":
        return _end_in_slurm(run)
    if run.target not in KUBERNETES:
        raise _unknown(run, f"{run.name} runs on this machine, if it does: Ctrl-C or SIGTERM ends it in order", _WATCH)
    cluster = _cluster(run)
    stopped = stop(cluster, run.name)
    if not stopped:
        raise _unknown(run, f"namespace {cluster.namespace} has nothing of {run.name} to stop")
    return stopped


def listed(namespace: str | None) -> dict[str, dict[str, State]]:
    return runs_in(connect(namespace))


def _pods(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    """Of training where there are any, else of the stage before it."""
    pods = cluster.find("Pod", selector(run))
    for stage in ("train", "preflight", "prepare", "fetch"):
        mine = [pod for pod in pods if pod["metadata"].get("labels", {}).get(STAGE_LABEL) == stage]
        if mine:
            return sorted(mine, key=_newest_by_number)
    return []


def _newest_by_number(pod: dict[str, Any]) -> tuple[int, str]:
    return pod_number(pod), str(pod["metadata"].get("creationTimestamp", ""))


def _slurm_states(run: Launched) -> dict[str, State]:
    name = object_name(run.name)
    stages = ("fetch", "prepare", "preflight", "train")
    listing = _slurm("squeue", "--noheader", "--format=%j|%T|%R", f"--name={','.join(f'{name}-{s}' for s in stages)}")
    states = {}
    for line in listing.splitlines():
        job, state, reason = [*line.strip().split("|"), "", ""][:3]
        phase: Any = "running" if state == "RUNNING" else "waiting"
        states[job.removeprefix(f"{name}-")] = State(phase, f"{state.lower()} {reason}".strip())
    return states


def _end_in_slurm(run: Launched) -> list[str]:
    """What waits is taken out of the queue; what trains saves, and is not queued again."""
    name = object_name(run.name)
    stages = ",".join(f"{name}-{stage}" for stage in ("fetch", "prepare", "preflight", "train"))
    jobs = [
        line.split() for line in _slurm("squeue", "--noheader", "--format=%A %j %T", f"--name={stages}").splitlines()
    ]
    if not jobs:
        raise _unknown(run, f"Slurm has no job of {run.name}")
    for job, stage, state in jobs:
        if state == "RUNNING" and stage == f"{name}-train":
            _slurm("scontrol", "update", f"jobid={job}", "Requeue=0")
            _slurm("scancel", "--signal=TERM", "--batch", job)
        else:
            _slurm("scancel", job)
    return [f"Slurm job {job}, {stage}" for job, stage, _ in jobs]


def _slurm(*line: str) -> str:
    try:
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise ArgosyError(
            "launch.slurm", f"{line[0]} is not on this machine", fix="run this where Slurm's commands are"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ArgosyError("launch.slurm", f"{line[0]}: {error.stderr.strip()}", fix="see what Slurm says") from None


def _cluster(run: Launched) -> Cluster:
    """Where a run that is not seen here is to be found."""
    try:
        return connect(run.namespace)
    except ArgosyError as error:
        if run.namespace is not None or run.directory.is_dir():
            raise
        raise _unknown(run, f"there is no {run.directory} here, and {error.cause}", error.fix) from None


def _unknown(run: Launched, cause: str, fix: str = _LIST) -> ArgosyError:
    return ArgosyError(
        "launch.not-found",
        cause,
        key="RUN",
        value=run.name,
        fix=fix.format(directory=run.directory),
    )

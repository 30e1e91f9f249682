"""Slurm scripts: bash and shellcheck accept them, and a real slurmctld and slurmd run them, signal them, and queue them again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import GPU_EXAMPLE, ROOT

from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.launch.place import place
from argosy.launch.render import render, write
from argosy.record.jsonl import read_metrics
from ports import free_port
from programs import tool
from waiting import PATIENCE_S, wait_for

SLURM = shutil.which("slurmctld") and shutil.which("slurmd") and os.geteuid() == 0


SHELLCHECK = tool("shellcheck")
WITH_SCRIPTS = pytest.mark.parametrize(
    ("spec", "overrides"),
    [
        (ROOT / "examples" / "slurm-llama3-8b.yaml", []),
        (GPU_EXAMPLE, ["cluster.slurm.container=registry/argosy:1", "cluster.slurm.mounts=[/a:/b]", "cluster.cloud=hyperpod"]),
        (GPU_EXAMPLE, ["cluster.env={GREETING: it's $HOME}"]),
    ],
)  # fmt: skip


def scripts_of(spec: Path, overrides: list[str], directory: Path) -> list[Path]:
    write(render(place(spec, overrides, "slurm")), directory)
    return sorted([*directory.glob("*.sbatch"), *directory.glob("*.sh")])


@WITH_SCRIPTS
def test_scripts_are_accepted_by_bash(spec: Path, overrides: list[str], tmp_path: Path) -> None:
    scripts = scripts_of(spec, overrides, tmp_path)
    assert {"train.sbatch", "submit.sh"} <= {script.name for script in scripts}
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


@WITH_SCRIPTS
@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck (Debian: shellcheck); .ci/run installs it")
def test_scripts_are_accepted_by_shellcheck(spec: Path, overrides: list[str], tmp_path: Path) -> None:
    # SC2016: a dollar in single quotes does not expand. It is a value, and is not meant to.
    line = [str(SHELLCHECK), "--exclude=SC2016", *scripts_of(spec, overrides, tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_script_asks_slurm_for_what_the_run_needs() -> None:
    script = render(place(ROOT / "examples" / "slurm-llama3-8b.yaml"))["train.sbatch"]
    for option in (
        "--nodes=8", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive", "--requeue", "--signal=B:TERM@900",
        "--open-mode=append", "--wait-all-nodes=1", "--partition=h100", "--time=2-00:00:00",
    ):  # fmt: skip
        assert f"#SBATCH {option}\n" in script
    passed = script.partition("--container-env=")[2].split()[0].split(",")
    exported = [line.split()[1].partition("=")[0] for line in script.splitlines() if line.startswith("export NCCL")]
    assert exported
    assert set(exported) <= set(passed)


@pytest.mark.parametrize(
    ("code", "restarts", "stages"),
    [
        (0, 0, set()),
        (2, 0, set()),
        (75, 0, {"prepare", "train"}),
        (75, 99, {"prepare", "train"}),
        (75, 100, {"train"}),
        (1, 9, {"prepare", "train"}),
        (1, 10, set()),
    ],
)
def test_what_can_go_on_is_queued_again(code: int, restarts: int, stages: set[str], tmp_path: Path) -> None:
    """A stand-in for srun ends with the code, and one for scontrol notes what it is asked for."""
    scripts_of(GPU_EXAMPLE, [], tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {tmp_path / "asked"}')):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ARGOSY_SPEC": str(tmp_path / "run.yaml"),
        "SLURM_RESTART_COUNT": str(restarts),
    }
    # The plain id of one task of an array stands for all of them.
    arrays = {"prepare": {"SLURM_ARRAY_JOB_ID": "prepare", "SLURM_ARRAY_TASK_ID": "1"}}
    for stage in ("prepare", "preflight", "train"):
        script = tmp_path / f"{stage}.sbatch"
        own = {"SLURM_JOB_ID": stage} | arrays.get(stage, {})
        done = subprocess.run(["bash", script], env=environment | own, check=False)
        assert done.returncode == code
        assert ("#SBATCH --requeue\n" in script.read_text()) is (stage != "preflight")
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert asked == [f"requeue {stage}{'_1' if stage in arrays else ''}" for stage in sorted(stages)]


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_an_interruption_counts_as_no_failure(stage: str, tmp_path: Path) -> None:
    """A stand-in for srun ends by the signal, as a data command does, long after the last restart for failures."""
    scripts_of(GPU_EXAMPLE, [], tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    tools_of = {
        "srun": f"echo $$ > {tmp_path / 'srun.part'}; mv {tmp_path / 'srun.part'} {tmp_path / 'srun'}; exec sleep 600",
        "scancel": f"kill -TERM $(cat {tmp_path / 'srun'})",
        "scontrol": f'echo "$@" >> {tmp_path / "asked"}',
    }
    for name, text in tools_of.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "ARGOSY_SPEC": str(tmp_path / "run.yaml")}
    environment |= {"SLURM_RESTART_COUNT": "50", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", tmp_path / f"{stage}.sbatch"], env=environment) as script:
        while not (tmp_path / "srun").exists():
            time.sleep(0.02)
        script.terminate()
        assert script.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 7"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of this one machine."""
    if not SLURM:
        pytest.skip("needs slurmctld and slurmd (Debian: slurm-wlm), and to be root")
    root = tmp_path / "slurm"
    for name in ("state", "spool"):
        (root / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    ports = [free_port(), free_port()]
    (root / "slurm.conf").write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/none\n"
        f"CredType=cred/none\nSlurmctldPort={ports[0]}\nSlurmdPort={ports[1]}\nStateSaveLocation={root}/state\n"
        f"SlurmdSpoolDir={root}/spool\nSlurmctldPidFile={root}/c.pid\nSlurmdPidFile={root}/d.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\nSchedulerType=sched/builtin\n"
        "MpiDefault=none\nSwitchType=switch/none\nReturnToService=2\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN\n"
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
    )
    (root / "bin").mkdir()
    argosy = root / "bin" / "argosy"
    argosy.write_text(f'#!/bin/sh\nexec {sys.executable} -m argosy "$@"\n')
    argosy.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", str(root / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    with (root / "log").open("w") as log:
        servers = [subprocess.Popen([name, "-D"], stdout=log, stderr=log) for name in ("slurmctld", "slurmd")]
        try:
            wait_for(
                lambda: "idle" in _ask("sinfo", "-h", "-o", "%T"), 120, lambda: (root / "log").read_text(), every_s=0.3
            )
            yield root
        finally:
            subprocess.run(["scancel", "--state=RUNNING"], check=False)
            subprocess.run(["scancel", "--state=PENDING"], check=False)
            for server in reversed(servers):
                server.terminate()
                server.wait(PATIENCE_S)


@pytest.mark.timeout(1500)
def test_a_run_goes_through_slurm_is_queued_again_when_its_time_is_up_and_ends_when_stopped(
    slurm: Path, write_spec: Callable[..., Path], argosy: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {n} says {n * n}"}}\n' for n in range(200)))
    recipe = {"inputs": [str(tmp_path / "text.jsonl")], "shards": 2}
    sources = [
        {"path": str(tmp_path / "made"), "prepare": recipe},
        {"path": str(tmp_path / "clean"), "prepare": recipe | {"curate": ["exact_duplicates"]}},
    ]
    cluster = {
        "target": "slurm", "gpus": 0, "ranks": 2, "nodes": 1, "cpus": 1, "preflight": False,
        "data": {"count": 2, "cpus": 1, "memory": "512Mi"},
    }  # fmt: skip
    spec = write_spec(
        cluster=cluster,
        data={"tokenizer": "bytes", "train": sources, "seq_len": 32, "split": [90, 10, 0]},
        train={"global_batch": 8, "steps": 100_000},
        parallel={"dp_replicate": 2, "micro_batch": 4},
        eval=False,
        log={"every": 1},
    )
    told = argosy("launch", spec)
    assert told.returncode == 0, told.stderr
    job = dict(line.split() for line in told.stdout.splitlines())["train"]
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    output = lambda: "\n".join(p.read_text() for p in tmp_path.rglob("*.out")) + _ask("scontrol", "show", "job", job)  # noqa: E731
    wait_for(lambda: metrics.exists() and max(read_metrics(metrics), default=0) >= 3, 400, output, every_s=0.3)
    # The stage before was an array of two tasks.
    assert read_manifest(tmp_path / "clean").documents == read_manifest(tmp_path / "made").documents == 200
    assert (tmp_path / "clean" / "curation.json").exists()
    assert "train" in argosy("status", spec).stdout
    subprocess.run(["scancel", "--signal=TERM", "--batch", job], check=True)  # what Slurm does when time runs out
    wait_for(lambda: "PENDING" in _ask("squeue", "-h", "-j", job, "-o", "%T"), 120, output, every_s=0.3)
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*")), output()
    saved = max(read_metrics(metrics))
    wait_for(lambda: _ask("sinfo", "-h", "-o", "%T").split() == ["idle"], 120, output, every_s=0.3)
    time.sleep(10)  # for the node to have forgotten the job's first start; Slurm itself waits two minutes
    subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=True)
    wait_for(lambda: max(read_metrics(metrics)) > saved + 3, 400, output, every_s=0.3)
    assert "back into the queue" in output()
    assert argosy("stop", spec).returncode == 0
    wait_for(lambda: not _ask("squeue", "-h", "-j", job, "-o", "%T").strip(), 120, output, every_s=0.3)
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))
    assert max(read_metrics(metrics)) < 100_000
    assert argosy("stop", spec).returncode == 2


def _ask(*line: str) -> str:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr

"""Slurm: a batch script for each stage, and one that submits them as a chain.

One task per node starts the ranks of that node. Before the time limit, or on preemption, Slurm signals the script; the run saves and
the script requeues the job. Data stages are requeued in the same way. Ranks get the same environment variables as in a pod.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from argosy.errors import EXIT_DONE, EXIT_REFUSED, EXIT_RESUMABLE, ArgosyError
from argosy.launch.fabric import DEVICE_ON_HOST
from argosy.launch.names import object_name
from argosy.launch.placement import Placement
from argosy.launch.pod import training_environment
from argosy.launch.render import render, write
from argosy.launch.stages import STAGES, TRAIN, Stage, stages_of
from argosy.launch.target import Launched, LaunchOptions, RunStatus, State, Target, logged_progress, not_found

SUBMIT = "submit.sh"
_SPEC = "$ARGOSY_SPEC"
_MARK = "@spec@"
# Starts of a data task that waits for the shares of others. Slurm holds a requeued job for two minutes, so these take over three hours.
_DATA_RESTARTS = 100


class SlurmTarget(Target):
    name = "slurm"

    def render(self, placed: Placement) -> dict[str, str]:
        stages = stages_of(placed)
        scripts = {f"{stage}.sbatch": _script(placed, stage) for stage in stages}
        return {"run.yaml": placed.source, **scripts, SUBMIT: _submit(stages)}

    def apply(self, placed: Placement, options: LaunchOptions) -> int:
        """Submit the chain of jobs. The spec is written where every node sees it: beside the run directories, or to --output."""
        directory = options.output or Path(placed.spec.runs_dir) / f".launch-{placed.name}"
        write(render(placed), directory)
        line = [str(directory / SUBMIT)]
        if options.only is not None:
            line = ["sbatch", "--parsable", str(directory / f"{options.only}.sbatch")]
        environment = os.environ | {"ARGOSY_SPEC": str(directory.resolve() / "run.yaml")}
        try:
            done = subprocess.run(line, check=False, env=environment, text=True, capture_output=True)
        except FileNotFoundError:
            done = None
        if done is None or done.returncode:
            raise ArgosyError(
                "launch.slurm",
                "sbatch is not on this machine" if done is None else f"Slurm refused the job: {done.stderr.strip()}",
                fix=f"submit {directory / SUBMIT} where Slurm's commands are"
                if done is None
                else "see what Slurm says; partition, account and time are in cluster.slurm",
            )
        options.say(done.stdout.strip() if options.only is None else f"{options.only} {done.stdout.strip()}")
        return EXIT_DONE

    def status(self, run: Launched) -> RunStatus:
        return RunStatus(run.name, stages=_states(run), progress=logged_progress(run))

    def stop(self, run: Launched) -> list[str]:
        """Cancel all jobs. A running training job saves first. None goes back into the queue."""
        jobs = [line.split() for line in _queued(run, "%A %j %T")]
        if not jobs:
            raise not_found(run, f"Slurm has no job of {run.name}")
        for job, stage, state in jobs:
            if state == "RUNNING":
                _ask("scontrol", "update", f"jobid={job}", "Requeue=0")
            saves = state == "RUNNING" and stage == _job_name(run, TRAIN.name)
            _ask("scancel", *(["--signal=TERM", "--batch"] if saves else []), job)
        return [f"Slurm job {job}, {stage}" for job, stage, _ in jobs]


TARGET = SlurmTarget()


def _states(run: Launched) -> dict[str, State]:
    states = {}
    for line in _queued(run, "%j|%T|%R"):
        job, state, reason = [*line.strip().split("|"), "", ""][:3]
        stage = job.removeprefix(_job_name(run, ""))
        states[stage] = State("running" if state == "RUNNING" else "waiting", f"{state.lower()} {reason}".strip())
    return states


def _queued(run: Launched, columns: str) -> list[str]:
    """Return one line with these columns for each queued or running job of the run."""
    names = ",".join(_job_name(run, stage) for stage in STAGES)
    return _ask("squeue", "--noheader", f"--format={columns}", f"--name={names}").splitlines()


def _job_name(run: Launched, stage: str) -> str:
    return f"{object_name(run.name)}-{stage}"


def _ask(*line: str) -> str:
    try:
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise ArgosyError(
            "launch.slurm", f"{line[0]} is not on this machine", fix="run this where Slurm's commands are"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ArgosyError("launch.slurm", f"{line[0]}: {error.stderr.strip()}", fix="see what Slurm says") from None


def _script(placed: Placement, stage: Stage) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(placed, stage)), "set -euo pipefail", ""]
    lines.append(': "${ARGOSY_SPEC:?submit this with submit.sh, which says where the run spec is}"')
    lines += placed.cluster.slurm.setup
    variables = _variables(placed, stage)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if stage.on_gpus:
        lines += [*_LOCAL_CACHES, ""]
    words = " ".join(_quoted(word) for word in stage.command(placed, _MARK))
    return "\n".join([*lines, *_step(placed, f"{_srun(placed, variables)} argosy {words}", stage), ""])


# Compiled kernels, on a disk of the node: the user's next job finds them there.
_LOCAL_CACHES = [
    'kernels="${TMPDIR:-/tmp}/argosy-kernels-$(id -u)"',
    'export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$kernels/triton}"',
    'export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$kernels/inductor}"',
]


def _options(placed: Placement, stage: Stage) -> list[str]:
    cluster, slurm = placed.cluster, placed.cluster.slurm
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time}
    options = [f"--job-name={placed.name}-{stage}", "--output=%x-%j.out", "--open-mode=append"]
    options += [f"--{option}={value}" for option, value in named.items() if value is not None]
    if cluster.storage is not None:
        options.append(f"--chdir={cluster.storage.mount}")
    if stage.resumes:
        options += ["--requeue", f"--signal=B:TERM@{int(cluster.grace.amount)}"]
    if not stage.on_gpus:
        workers = cluster.data
        return [*options, f"--array=0-{workers.count - 1}", "--ntasks=1", f"--cpus-per-task={workers.cpus}",
                f"--mem={workers.memory.removesuffix('i')}", *slurm.options]  # fmt: skip
    options += [f"--nodes={cluster.nodes}", "--ntasks-per-node=1", "--wait-all-nodes=1"]
    if placed.gpus:
        options += [f"--gpus-per-node={placed.gpus}", "--exclusive", "--mem=0"]
    elif placed.cpus:
        options.append(f"--cpus-per-task={placed.cpus}")
    return [*options, *slurm.options]


def _variables(placed: Placement, stage: Stage) -> dict[str, str]:
    if not stage.on_gpus:
        return {"ARGOSY_WORKERS": str(placed.cluster.data.count)} | placed.cluster.env
    return {"PYTHONUNBUFFERED": "1"} | training_environment(placed, DEVICE_ON_HOST) | placed.cluster.env


def _srun(placed: Placement, variables: dict[str, str]) -> str:
    words = ["srun", "--kill-on-bad-exit=1"]
    slurm, storage = placed.cluster.slurm, placed.cluster.storage
    if slurm.container is not None:
        mounts = [f"{storage.mount}:{storage.mount}"] if storage is not None else []
        passed = [*variables, "ARGOSY_SPEC", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"]
        words += [
            f"--container-image={shlex.quote(slurm.container)}",
            f"--container-mounts={','.join([*mounts, *slurm.mounts, _quoted(_MARK) + ':' + _quoted(_MARK)])}",
            f"--container-env={','.join(passed)}",
        ]
    if placed.cluster.cloud_facts.auto_resume:
        words.append('"${auto_resume[@]}"')
    return " ".join(words)


def _step(placed: Placement, step: str, stage: Stage) -> list[str]:
    """Return the lines that run the stage's command, and queue the job again unless it is done, refused or out of restarts."""
    lines = []
    if placed.cluster.cloud_facts.auto_resume:
        lines += ["auto_resume=()", "if [ -d /opt/sagemaker_cluster ]; then auto_resume=(--auto-resume=1); fi"]
    if not stage.resumes:
        return [*lines, f"exec {step}"]
    # Training goes on however often it was interrupted. A data task may wait for the share of one that was refused.
    again = "" if stage.trains else f' && [ "$restarts" -lt {_DATA_RESTARTS} ]'
    return [
        *lines,
        "# A plain job id may stand for the whole array.",
        'job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"',
        'job="${job:-$SLURM_JOB_ID}"',
        f"{step} &",
        "step=$!",
        "interrupted=",
        "# srun would end its tasks at once; signalled through Slurm, they save first.",
        "trap 'interrupted=1; scancel --signal=TERM \"$job.0\" || true' TERM",
        "code=0",
        'wait "$step" || code=$?',
        'while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait, not the run',
        "  code=0",
        '  wait "$step" || code=$?',
        "done",
        'restarts="${SLURM_RESTART_COUNT:-0}"',
        f'if [ "$code" -eq {EXIT_RESUMABLE} ]; then interrupted=1; fi',
        f'if [ "$code" -ne 0 ] && [ "$code" -ne {EXIT_REFUSED} ] &&',
        f'   {{ {{ [ -n "$interrupted" ]{again}; }} || [ "$restarts" -lt {placed.cluster.restarts} ]; }}; then',
        "  # Slurm ends this script when it queues the job again, and says itself why if it does not.",
        '  echo "exit code $code after $restarts restarts: back into the queue"',
        '  scontrol requeue "$job" || true',
        "fi",
        'exit "$code"',
    ]


def _quoted(word: str) -> str:
    return f'"{_SPEC}"' if word == _MARK else shlex.quote(word)


def _submit(stages: list[Stage]) -> str:
    """Return the script that submits each stage to run after the previous one succeeds, and prints each job's id."""
    lines = [
        "#!/bin/bash",
        "set -euo pipefail",
        'here="$(cd "$(dirname "$0")" && pwd)"  # relative paths of the run spec start where this is called',
        'export ARGOSY_SPEC="${ARGOSY_SPEC:-$here/run.yaml}"',
    ]
    before: Stage | None = None
    for stage in stages:
        after = "" if before is None else f'--dependency="afterok:${before}" --kill-on-invalid-dep=yes '
        lines += [f'{stage}=$(sbatch --parsable {after}"$here/{stage}.sbatch")', f'echo "{stage} ${stage}"']
        before = stage
    return "\n".join([*lines, ""])

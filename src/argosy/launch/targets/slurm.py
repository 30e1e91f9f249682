"""Slurm: a batch script for each stage, and one that submits them as a chain.

A task on each node starts that node's ranks. Before the time limit, or when the job is preempted, Slurm signals the script; the
run saves and the job is put back into the queue. The variables are those a pod gets.
"""

from __future__ import annotations

import shlex

from argosy.errors import EXIT_REFUSED, EXIT_RESUMABLE
from argosy.launch.placement import Placement
from argosy.launch.pod import training_environment
from argosy.launch.stages import DATA_STAGES, Stage, command, stages_of

SUBMIT = "submit.sh"
_SPEC = "$ARGOSY_SPEC"
_MARK = "@spec@"


def slurm_files(placed: Placement) -> dict[str, str]:
    stages = stages_of(placed)
    scripts = {f"{stage}.sbatch": _script(placed, stage) for stage in stages}
    return {"run.yaml": placed.source, **scripts, SUBMIT: _submit(stages)}


def _script(placed: Placement, stage: Stage) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(placed, stage)), "set -euo pipefail", ""]
    lines.append(': "${ARGOSY_SPEC:?submit this with submit.sh, which says where the run spec is}"')
    lines += placed.cluster.slurm.setup
    variables = _variables(placed, stage)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if stage not in DATA_STAGES:
        lines += ['scratch="${TMPDIR:-/tmp}/argosy-$SLURM_JOB_ID"', *_LOCAL_CACHES, ""]
    words = " ".join(_quoted(word) for word in command(placed, stage, _MARK))
    if stage in DATA_STAGES:
        return "\n".join([*lines, f"exec {_srun(placed, variables)} argosy {words}", ""])
    return "\n".join([*lines, *_training(placed, f"{_srun(placed, variables)} argosy {words}", stage), ""])


_LOCAL_CACHES = [
    'export TRITON_CACHE_DIR="$scratch/triton" TORCHINDUCTOR_CACHE_DIR="$scratch/inductor"',
]


def _options(placed: Placement, stage: Stage) -> list[str]:
    cluster, slurm = placed.cluster, placed.cluster.slurm
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time}
    options = [f"--job-name={placed.name}-{stage}", "--output=%x-%j.out", "--open-mode=append"]
    options += [f"--{option}={value}" for option, value in named.items() if value is not None]
    if cluster.storage is not None:
        options.append(f"--chdir={cluster.storage.mount}")
    if stage in DATA_STAGES:
        workers = cluster.data
        return [*options, f"--array=0-{workers.count - 1}", "--ntasks=1", f"--cpus-per-task={workers.cpus}",
                f"--mem={workers.memory.removesuffix('i')}", *slurm.options]  # fmt: skip
    options += [f"--nodes={cluster.nodes}", "--ntasks-per-node=1", "--wait-all-nodes=1"]
    if placed.gpus:
        options += [f"--gpus-per-node={placed.gpus}", "--exclusive", "--mem=0"]
    elif placed.cpus:
        options.append(f"--cpus-per-task={placed.cpus}")
    if stage == "train":
        options += ["--requeue", f"--signal=B:TERM@{int(cluster.grace.amount)}"]
    return [*options, *slurm.options]


def _variables(placed: Placement, stage: Stage) -> dict[str, str]:
    if stage in DATA_STAGES:
        return {"ARGOSY_WORKERS": str(placed.cluster.data.count)} | placed.cluster.env
    return {"PYTHONUNBUFFERED": "1"} | training_environment(placed) | placed.cluster.env


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
    if placed.cluster.cloud == "hyperpod":
        words.append('"${auto_resume[@]}"')
    return " ".join(words)


def _training(placed: Placement, step: str, stage: Stage) -> list[str]:
    lines = []
    if placed.cluster.cloud == "hyperpod":
        lines += ["auto_resume=()", "if [ -d /opt/sagemaker_cluster ]; then auto_resume=(--auto-resume=1); fi"]
    if stage != "train":
        return [*lines, f"exec {step}"]
    return [
        *lines,
        f"{step} &",
        "step=$!",
        "# srun would end its tasks at once; signalled through Slurm, they save first.",
        "trap 'scancel --signal=TERM \"$SLURM_JOB_ID.0\" || true' TERM",
        "code=0",
        'wait "$step" || code=$?',
        'while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait, not the run',
        "  code=0",
        '  wait "$step" || code=$?',
        "done",
        'restarts="${SLURM_RESTART_COUNT:-0}"',
        f'if [ "$code" -eq {EXIT_RESUMABLE} ] ||',
        f'   {{ [ "$code" -ne 0 ] && [ "$code" -ne {EXIT_REFUSED} ] && [ "$restarts" -lt {placed.cluster.restarts} ]; }}; then',
        '  scontrol requeue "$SLURM_JOB_ID" && echo "exit code $code after $restarts restarts: back into the queue"',
        "fi",
        'exit "$code"',
    ]


def _quoted(word: str) -> str:
    return f'"{_SPEC}"' if word == _MARK else shlex.quote(word)


def _submit(stages: list[Stage]) -> str:
    """Each stage after the one before it has succeeded; prints the number of each job."""
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

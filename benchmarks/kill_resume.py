"""Bit-equal resume after a SIGKILL, with a preset as shipped.

    python benchmarks/kill_resume.py [--preset gpt2] [--batch 32] [--seq-len 1024] [--steps 200] [KEY=VALUE …]

Trains a run twice: once undisturbed, once killed in the middle and started again. Losses, gradient norms and the files of the last checkpoint
have to be equal. It exits with 1 if they are not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shipped import argosy, make_corpus

from argosy.record.jsonl import read_metrics


def write_spec(folder: Path, name: str, arguments: argparse.Namespace, corpus: Path) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nruns_dir: {folder}/runs\nmodel: {{preset: {arguments.preset}}}\ndata: {{train: {corpus}, seq_len: {arguments.seq_len}}}\n"
        f"train: {{global_batch: {arguments.batch}, steps: {arguments.steps}}}\noptim: {{lr: 1.0e-4}}\nlog: {{every: 1}}\n"
        f"checkpoint: {{every: {max(1, arguments.steps * 3 // 10)}}}\n"
    )
    return path


def kill_at(run: Path, step: int, command: list[str]) -> int:
    """Start a run, kill all its processes when it has logged a step, and return the last step that it logged."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and last_step(run) < step:
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit("the run ended before it could be killed: more --steps")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return last_step(run)


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    return max(read_metrics(file), default=0) if file.exists() else 0


def outcome(run: Path, steps: int) -> tuple[dict[int, tuple[object, object]], dict[str, str]]:
    """Return loss and gradient norm by step, and the hashes of the weights and the optimiser's state in the last checkpoint."""
    metrics = {
        step: (row["loss"], row["grad_norm"])
        for step, row in read_metrics(run / "metrics.jsonl").items()
        if "loss" in row
    }
    checkpoint = run / "checkpoints" / f"step-{steps:08}"
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in checkpoint.rglob("*.safetensors")}
    return metrics, files


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        corpus = make_corpus(folder, arguments.vocabulary, 40 * arguments.batch * arguments.seq_len)
        argosy("train", write_spec(folder, "whole", arguments, corpus), *arguments.keys)
        spec, run = write_spec(folder, "killed", arguments, corpus), folder / "runs" / "killed"
        command = [sys.executable, "-m", "argosy", "train", str(spec), *arguments.keys]
        killed = kill_at(run, arguments.steps // 2, command)
        said = argosy("train", spec, *arguments.keys)
        print(f"killed after step {killed};", next(line for line in said.splitlines() if line.startswith("resuming")))
        whole, resumed = (outcome(folder / "runs" / name, arguments.steps) for name in ("whole", "killed"))
    unequal = [step for step in whole[0] if whole[0][step] != resumed[0].get(step)]
    print(f"{len(whole[0])} steps, {len(unequal)} with another loss or gradient norm {unequal[:5]}")
    print(f"{len(whole[1])} files of the last checkpoint, {'equal' if whole[1] == resumed[1] else 'NOT EQUAL'}")
    return int(bool(unequal) or not whole[1] or whole[1] != resumed[1])


if __name__ == "__main__":
    sys.exit(main())

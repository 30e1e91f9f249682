"""What measuring and sinks cost: steps of one run with all local sinks on, against the same steps with nothing logged (bar: 1%).

Runs alternate, so that a machine that speeds up or slows down does so for both. `train.device=cuda` and a larger model may be
given as overrides; the default is a tiny model on the CPU, which is the hard case: its steps are short.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from argosy.record.jsonl import read_jsonl

ROUNDS = int(os.environ.get("ROUNDS", "5"))
STEPS = int(os.environ.get("STEPS", "300"))
SPEC = """
model: {family: llama, layers: 2, hidden: 128, heads: 4, vocab_size: 512}
data: {train: CORPUS, split: [100, 0, 0], seq_len: 64}
train: {global_batch: 8}
optim: {lr: 1.0e-3}
eval: off
checkpoint: {every: 1h}
"""
SINKS = ["log.every=10", "log.sinks.tensorboard=true", "log.sinks.prometheus=0", "log.sinks.wandb=overhead"]
OFF = [f"log.every={STEPS}"]


def corpus(folder: Path) -> Path:
    from argosy.data.prepare.job import PrepareOptions, prepare
    from argosy.data.text.tokenizer import ByteTokenizer

    text = folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"argosy sails " * 200}{i}"}}\n' for i in range(400)))
    prepare([str(text)], ByteTokenizer(), folder / "corpus", PrepareOptions())
    return folder / "corpus"


def seconds_per_step(folder: Path, name: str, more: list[str]) -> float:
    spec = folder / "run.yaml"
    command = [
        sys.executable,
        "-m",
        "argosy",
        "train",
        str(spec),
        f"name={name}",
        f"runs_dir={folder}/runs",
        f"train.steps={STEPS}",
    ]
    environ = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([*command, "--quiet", *more, *sys.argv[1:]], check=True, env=environ, stdout=subprocess.DEVNULL)
    last = [record for record in read_jsonl(folder / "runs" / name / "metrics.jsonl") if "spent" in record][-1]
    return float(last["spent"]["productive"] + last["spent"]["data"]) / STEPS


def parts() -> None:
    """Processor time of what the trainer itself does for the record, which a busy machine does not blur."""
    import time

    import torch

    from argosy.config.watching import AlertsSpec
    from argosy.record.alerts import Alerts
    from argosy.record.jsonl import JsonlWriter, Record
    from argosy.train.phases import Phases

    phases, count = Phases(torch.device("cpu")), 20_000
    started = time.process_time()
    for _ in range(count):
        for part in ("communication", "forward_backward", "communication", "optimizer"):
            phases.enter(part)
        phases.end_step()
    marks = (time.process_time() - started) / count
    record: Record = {f"figure {i}": i / 7 for i in range(40)} | {"loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 1e5}
    with tempfile.TemporaryDirectory() as folder, JsonlWriter(Path(folder) / "metrics.jsonl") as metrics:
        alerts = Alerts(AlertsSpec(), Path(folder))
        started = time.process_time()
        for step in range(2000):
            phases.take()
            alerts.observe(record | {"step": step})
            metrics.write(record)
        log = (time.process_time() - started) / 2000
    print(f"processor time: {1e6 * marks:.1f} us a step for marks, {1e6 * log:.0f} us a log for the record and alerts")


def main() -> None:
    parts()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "run.yaml").write_text(SPEC.replace("CORPUS", str(corpus(root))))
        times: dict[str, list[float]] = {"off": [], "on": []}
        for i in range(ROUNDS):
            for name, more in (("off", OFF), ("on", SINKS)):
                times[name].append(seconds_per_step(root, f"{name}-{i}", more))
        off, on = (statistics.median(times[name]) for name in ("off", "on"))
        pairs = [b / a - 1 for a, b in zip(times["off"], times["on"], strict=True)]
        print(
            f"nothing logged {1000 * off:.3f} ms a step; all local sinks, a log every 10 steps {1000 * on:.3f} ms: {on / off - 1:+.2%}"
        )
        print("round by round: " + ", ".join(f"{pair:+.2%}" for pair in pairs))


if __name__ == "__main__":
    main()

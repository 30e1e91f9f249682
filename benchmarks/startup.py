"""A benchmark of the command line's start-up time.

It runs `argosy --help` (bar: 0.3 s), `argosy config show`, and `argosy train` of three steps of a tiny model from start to exit, and
prints the best and the median of ten.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = """
model: {{family: gpt, layers: 2, hidden: 64, heads: 4, vocab_size: 272, max_seq_len: 64}}
data: {{train: {folder}/corpus, seq_len: 32, split: [100, 0, 0]}}
train: {{global_batch: 4, steps: 3}}
optim: {{lr: 1.0e-3}}
eval: off
runs_dir: {folder}/runs
"""


def argosy(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "argosy", *arguments], check=True, capture_output=True)


def measure(*arguments: str) -> list[float]:
    seconds = []
    for turn in range(10):
        started = time.perf_counter()
        argosy(*(argument.replace("TURN", str(turn)) for argument in arguments))
        seconds.append(time.perf_counter() - started)
    return seconds


def run_spec(folder: Path) -> str:
    """Write the run spec of a tiny run and its corpus."""
    (folder / "text.jsonl").write_text(100 * '{"text": "argosy sails"}\n')
    argosy("data", "prepare", str(folder / "text.jsonl"), "--tokenizer", "bytes", "--output", str(folder / "corpus"))
    (folder / "run.yaml").write_text(SPEC.format(folder=folder))
    return str(folder / "run.yaml")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train = ["train", run_spec(Path(folder)), "name=runTURN"]
        verbs = {
            "--help": ["--help"],
            "config show": ["config", "show"],
            "config models": ["config", "models"],
            "train": train,
        }
        for verb, arguments in verbs.items():
            seconds = measure(*arguments)
            print(f"argosy {verb:<15} best {min(seconds):.3f} s   median {statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()

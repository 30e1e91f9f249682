"""What the commands of the pages find in their directory: a folder of texts, and what a reader has after the first run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from argosy.demo.stories import stories

ROOT = Path(__file__).parents[1]

RUN = """
name: first
model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 4, vocab_size: 512}
data: {train: corpus, split: [90, 10, 0], seq_len: 64}
train: {global_batch: 8, steps: 20}
optim: {lr: 1.0e-3, warmup: 2ba}
eval: {every: 10ba, batches: 2}
checkpoint: {every: 10ba, keep: 3, mode: sync}
"""
MOE = RUN.replace("name: first", "name: experts").replace("vocab_size", "moe: {experts: 4, top_k: 2}, vocab_size")
MADE = """
argosy data train-tokenizer my-texts --vocab-size 512 --output tokenizer.json
argosy data prepare my-texts --tokenizer tokenizer.json --output corpus
argosy train run.yaml --quiet
"""


def write_texts(directory: Path, count: int) -> None:
    """Write a folder of texts, `my-texts`, and lead to the examples."""
    (directory / "my-texts").mkdir(parents=True)
    (directory / "examples").symlink_to(ROOT / "examples")
    with (directory / "my-texts" / "stories.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in stories(count))


def make_first_run(directory: Path, environment: dict[str, str]) -> None:
    """Make what a reader has after the first run: a tokenizer, a corpus, a run spec and the run, all very small."""
    (directory / "run.yaml").write_text(RUN)
    (directory / "moe.yaml").write_text(MOE)
    subprocess.run(["bash", "-euc", MADE], cwd=directory, env=environment, check=True, capture_output=True)

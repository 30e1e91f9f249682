"""A comparison of the training loss in fp8 and in bf16: the same model on the same bytes of Python's own sources.

    python benchmarks/fp8_loss.py [--steps 200] [KEY=VALUE …]

On a CPU the 8-bit rounding is emulated; on a GPU the hardware does it. Run spec overrides choose another model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from argosy.config.resolve import resolve
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import EXIT_DONE
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train

BAR = 0.01
# The number of final steps whose losses are averaged.
LAST = 20
RUN = [
    "model.family=gpt", "model.layers=4", "model.hidden=128", "model.heads=4", "model.vocab_size=272",
    "model.max_seq_len=128", "train.global_batch=16", "parallel.micro_batch=16", "optim.lr=2e-3", "optim.warmup=10",
    "eval=off", "log.every=1", "checkpoint.every=100000",
]  # fmt: skip


class Compared(NamedTuple):
    bf16: float
    fp8: float

    @property
    def difference(self) -> float:
        """Relative difference of fp8's loss to bf16's."""
        return self.fp8 / self.bf16 - 1


def compare(directory: Path, steps: int, overrides: Sequence[str] = ()) -> Compared:
    """Return the mean loss of the last steps in each precision. `directory` gets the corpus and the runs."""
    corpus = _corpus(directory)
    means = {}
    for precision in Compared._fields:
        where = [f"name={precision}", f"runs_dir={directory}", f"data.train={corpus}", f"train.precision={precision}"]
        resolved = resolve(None, [*RUN, *where, f"train.steps={steps}", *overrides])
        if train(resolved, None, TrainOptions(quiet=True)) != EXIT_DONE:
            raise SystemExit(f"the run in {precision} was stopped before its last step")
        records = read_metrics(directory / precision / "metrics.jsonl")
        means[precision] = statistics.fmean(records[step]["loss"] for step in sorted(records)[-LAST:])
    return Compared(**means)


def _corpus(directory: Path) -> Path:
    source, corpus = directory / "python.jsonl", directory / "corpus"
    with source.open("w", encoding="utf-8") as file:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            file.write(json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n")
    prepare([str(source)], ByteTokenizer(), corpus, PrepareOptions())
    return corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = compare(Path(directory), arguments.steps, arguments.overrides)
    print(f"mean loss of the last {LAST} of {arguments.steps} steps: bf16 {found.bf16:.4f}, fp8 {found.fp8:.4f}")
    print(f"fp8 differs by {found.difference:+.2%} (bar: {BAR:.0%})")


if __name__ == "__main__":
    main()

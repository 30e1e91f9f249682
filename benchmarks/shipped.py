"""A benchmark that cannot flatter: `argosy train` itself, presets as shipped, beside the loops people write themselves.

    python benchmarks/shipped.py [WORK …] [--steps 60] [--only argosy,floor,plain,transformers] [--precision fp8] [--json FILE]

Each run is its own process, one after the other on the same GPU. Argosy's has a preset, a corpus made by `argosy data prepare` and the keys
that every run must have (sequence length, batch, steps, learning rate): no other key is set. Its step is the median of those its own
metrics tell, in the second half of the run; "start" is from the command to the end of the first step. "floor" is the time of the matmuls and
attention kernels of such a step alone, by `argosy bench` with the run's micro-batch. The loops of `peers.py` run
with the largest micro-batch of theirs that fits, in the 16-bit type that Argosy trains in, or in fp32 where it does. A run that fails is a
row of the table, and the others go on; the command then ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOOPS = ("plain", "transformers")
WHO = ("argosy", "floor", *LOOPS)
COLUMNS = ("work", "who", "precision", "step", "tokens/s", "MFU", "memory", "micro-batch", "start", "")
# Metrics have the mean of every 10 steps. Kernels are compiled in the first 10, which are not reported.
FEWEST_STEPS = 20


class RunFailed(Exception):
    """A command that ended with an error, with what it printed."""


@dataclass(frozen=True)
class Work:
    preset: str
    batch: int
    seq_len: int
    vocabulary: int
    keys: tuple[str, ...] = ()
    # Who else can do the same work.
    peers: tuple[str, ...] = ("floor", *LOOPS)

    def by(self, who: str) -> bool:
        return who == "argosy" or who in self.peers


WORKS = {
    "gpt2": Work("gpt2", 64, 1024, 50_257),
    "gpt2-large": Work("gpt2-large", 32, 1024, 50_257),
    "llama3-1b": Work("llama3-1b", 4, 8192, 128_256),
    "llama3-8b-shape": Work("llama3-8b", 2, 8192, 128_256, ("model.layers=8",)),
    # The corpus has documents of 1,000 tokens: there is less attention to compute.
    "llama3-1b-documents": Work("llama3-1b", 4, 8192, 128_256, ("data.document_mask=true",), peers=()),
    "gpt2-large-fp8": Work("gpt2-large", 32, 1024, 50_257, ("train.precision=fp8",), peers=("floor",)),
    "llama3-1b-fp8": Work("llama3-1b", 4, 8192, 128_256, ("train.precision=fp8",), peers=("floor",)),
    "llama3-8b-shape-fp8": Work(
        "llama3-8b", 2, 8192, 128_256, ("model.layers=8", "train.precision=fp8"), peers=("floor",)
    ),
    # For a machine without a GPU, to try the benchmark itself.
    "smoke": Work("gpt2", 4, 32, 500, ("model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab_size=500")),
}


def make_corpus(folder: Path, vocabulary: int, tokens: int) -> Path:
    """Prepare text whose words are drawn by Zipf's law, one id a word, as a tokenizer of this size would give."""
    import numpy as np

    corpus = folder / f"corpus-{vocabulary}"
    if (corpus / "manifest.json").exists():
        return corpus
    words = {f"w{number}": number for number in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    added = {
        "id": vocabulary - 1,
        "content": f"w{vocabulary - 1}",
        "special": True,
        "single_word": False,
        "lstrip": False,
    }
    tokenizer = {
        "version": "1.0", "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [added | {"rstrip": False, "normalized": False}],
    }  # fmt: skip
    (folder / f"{corpus.name}.json").write_text(json.dumps(tokenizer))
    tokens = max(tokens, 20_000)
    drawn = np.minimum(np.random.default_rng(0).zipf(1.2, tokens) - 1, vocabulary - 2)
    with (folder / f"{corpus.name}.jsonl").open("w") as file:
        for document in np.array_split(drawn, max(200, tokens // 1000)):
            file.write(json.dumps({"text": " ".join(f"w{number}" for number in document)}) + "\n")
    argosy(
        "data", "prepare", file.name, "--tokenizer", folder / f"{corpus.name}.json", "--eod", f"w{vocabulary - 1}", "--output", corpus
    )  # fmt: skip
    return corpus


def argosy(*words: object) -> str:
    """Run a command of Argosy. Returns what it printed, or raises RunFailed."""
    command = [sys.executable, "-m", "argosy", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def train(name: str, work: Work, folder: Path, steps: int, more: list[str]) -> dict[str, Any]:
    """Train as a user does, with nothing but the preset and what every run must have."""
    corpus = make_corpus(folder, work.vocabulary, (steps + 10) * work.batch * (work.seq_len + 1) * 10 // 9)
    run = folder / "runs" / f"{name}-{len(list(folder.glob('runs/*')))}"
    spec = folder / f"{run.name}.yaml"
    spec.write_text(
        f"name: {run.name}\nruns_dir: {run.parent}\nmodel: {{preset: {work.preset}}}\n"
        f"data: {{train: {corpus}, seq_len: {work.seq_len}}}\ntrain: {{global_batch: {work.batch}, steps: {steps}}}\noptim: {{lr: 1.0e-4}}\n"
    )
    began = time.time()
    said = argosy("train", spec, *work.keys, *more)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_s" in row]
    # A row has the mean of the steps since the last one. In the first row, kernels are compiled.
    late = [row for row in rows[1:] if row["step"] > steps // 2]
    if not late:
        raise RunFailed(
            "the second half of the run has no row of metrics without the first steps, which compile kernels"
        )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    first = next((event["time"] for event in events if event["event"] == "memory"), rows[0]["time"])
    resolved = json.loads((run / "resolved.json").read_text())
    # The checkpoints of all works together may not fit on the disk.
    shutil.rmtree(run / "checkpoints")
    return {
        "step_s": statistics.median(row["step_s"] for row in late),
        "mfu": late[-1].get("mfu"),
        "memory_gib": late[-1].get("memory_gib"),
        "start_s": first - began,
        "micro_batch": _find(resolved, "micro_batch"),
        "precision": resolved["machine"]["precision"],
        "attention": next((line for line in said.splitlines() if line.startswith("attention")), None),
    }


def _find(tree: Any, key: str) -> Any:
    """Return the first value of a key, however deep."""
    if not isinstance(tree, dict):
        return None
    return tree[key] if key in tree else next((found for value in tree.values() if (found := _find(value, key))), None)


def floor(work: Work, steps: int, more: list[str], micro_batch: int) -> dict[str, Any]:
    """Time the matmuls and attention kernels of a step on random tokens."""
    shape = ["--batch", work.batch, "--seq-len", work.seq_len, "--micro-batch", micro_batch]
    said = argosy(
        "bench", work.preset, *shape, "--steps", steps, "--json", "train.deterministic=true", *work.keys, *more
    )
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return {
        "step_s": found["floor_ms"] / 1000,
        "micro_batch": found["micro_batch"],
        "precision": found["precision"],
        "bench_step_s": found["step_ms"] / 1000,
    }


def peer(loop: str, name: str, steps: int, precision: str) -> dict[str, Any]:
    """Run a loop of `peers.py` with the largest micro-batch that fits. `precision` is a value of `train.precision`."""
    micro_batch, said = WORKS[name].batch, ""
    while micro_batch:
        command = [
            sys.executable, str(HERE / "peers.py"), loop, name, "--steps", str(steps), "--micro-batch", str(micro_batch),
            "--precision", precision,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        said, micro_batch = done.stderr[-2000:], micro_batch // 2
        if "OutOfMemoryError" not in done.stderr:
            break
    raise RunFailed(said)


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print all results as a table of Markdown."""
    print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|")
    for name, found in results.items():
        for who, result in found.items():
            cells = _failed_cells(result["error"]) if "error" in result else _cells(WORKS[name], result)
            work = f"{name}, {WORKS[name].batch} x {WORKS[name].seq_len}"
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in (work, who, *cells)) + " |", flush=True)


def _cells(work: Work, result: dict[str, Any]) -> list[str]:
    rate = work.batch * work.seq_len / result["step_s"]
    mfu, memory, start = result.get("mfu"), result.get("memory_gib"), result.get("start_s")
    return [
        result["precision"], f"{1000 * result['step_s']:.1f} ms", f"{rate / 1000:.1f}K", f"{mfu:.1%}" if mfu else "",
        f"{memory:.1f} GiB" if memory else "", str(result["micro_batch"]), f"{start:.1f} s" if start else "",
        result.get("attention") or "",
    ]  # fmt: skip


def _failed_cells(said: str) -> list[str]:
    """Return the cells of a run that failed: the cause in an error of Argosy, or the last line of a traceback, is in the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    causes = [line.removeprefix("cause").strip() for line in lines if line.startswith("cause ")]
    reason = (causes or lines or ["no output"])[-1]
    return ["", "failed", *[""] * (len(COLUMNS) - 5), reason]


def main() -> None:
    options = _options()
    more = [*options.key, *([f"train.precision={options.precision}"] if options.precision else [])]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in options.works or [name for name in WORKS if name != "smoke"]:
                found, size = results.setdefault(name, {}), None
                for who in options.only:
                    if WORKS[name].by(who):
                        row = "argosy" + "".join(f" {key}" for key in more) if who == "argosy" else who
                        found[row] = _measure(name, who, Path(folder), options.steps, more, size)
                        if who == "argosy":
                            size = found[row].get("micro_batch")
                        print(f"{name} {row}: {found[row]}", file=sys.stderr, flush=True)
    finally:
        show(results)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))
    if any("error" in result for found in results.values() for result in found.values()):
        raise SystemExit(1)


def _measure(name: str, who: str, folder: Path, steps: int, more: list[str], micro_batch: int | None) -> dict[str, Any]:
    """Time one run, the floor's with the micro-batch that Argosy's had. Returns its numbers, or the error that it ended with."""
    try:
        if who == "argosy":
            return train(name, WORKS[name], folder, steps, more)
        if who == "floor":
            if micro_batch is None:
                return {"error": "there is no run of argosy before it, whose micro-batch it would have"}
            return floor(WORKS[name], max(8, steps // 4), more, micro_batch)
        asked = [key.partition("=")[2] for key in more if key.startswith("train.precision=")]
        return peer(who, name, max(8, steps // 2), asked[-1] if asked else "auto")
    except RunFailed as error:
        return {"error": str(error)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(WORKS))
    parser.add_argument(
        "--steps", type=int, default=60, help=f"of Argosy's runs, at least {FEWEST_STEPS}; peers do half"
    )
    parser.add_argument("--only", default=",".join(WHO), help="who runs, separated by commas")
    parser.add_argument("--precision", help="train.precision of all runs; Argosy's default without it")
    parser.add_argument(
        "--key", action="append", default=[], help="KEY=VALUE for Argosy's runs, to see what a key is worth"
    )
    parser.add_argument("--json", help="write all results to this file")
    options = parser.parse_args()
    options.only = options.only.split(",")
    # With nargs="*", argparse of Python 3.11 refuses an empty list as no choice.
    for flag, given, known in (("WORK", options.works, tuple(WORKS)), ("--only", options.only, WHO)):
        for word in given:
            if word not in known:
                parser.error(f"{flag}: {word!r} is none of {', '.join(known)}")
    if options.steps < FEWEST_STEPS:
        parser.error(
            f"--steps: {options.steps} is below {FEWEST_STEPS}: metrics are means of 10 steps, and the first 10 compile kernels"
        )
    return options


if __name__ == "__main__":
    main()

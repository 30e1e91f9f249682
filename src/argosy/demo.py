"""`argosy demo`: the whole journey in two minutes on any machine, using the same commands a user would.

The corpus is the Python standard library of the interpreter that runs this, so nothing is downloaded. Training runs as
`argosy train` in a process of its own; half-way that process is killed with SIGKILL and the same command is run again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from argosy.config.resolve import resolve
from argosy.config.seeds import derive_seed
from argosy.data.corpus.manifest import FILE_NAME
from argosy.data.prepare.job import prepare
from argosy.data.prepare.report import describe
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.tokenizer import load_tokenizer, train_bpe
from argosy.record.console import clock
from argosy.record.jsonl import read_metrics
from argosy.record.plot import plot
from argosy.record.rundir import RunDir

VOCABULARY = 4096
CORPUS_BYTES = 10_000_000
TOKENIZER_BYTES = 3_000_000
RUN_SPEC = """\
# Written by `argosy demo`. Change it, rename the run, and train your own: argosy train {path}
name: demo
runs_dir: {runs}
model:
  family: llama
  layers: 3
  hidden: 256
  heads: 4
  ffn: 896
  vocab_size: {vocabulary}
data:
  train: {corpus}
  split: [95, 5, 0]
  seq_len: 128
train:
  global_batch: 8
  steps: {steps}
optim:
  lr: 1.0e-3
  warmup: {warmup}
eval:
  every: {eval_every}
  batches: 8
checkpoint:
  every: {save_every}
log:
  every: 5
"""


def run_demo(directory: Path, seconds: int) -> None:
    """Everything the demo does, in the order a user would."""
    directory.mkdir(parents=True, exist_ok=True)
    _title(1, "A corpus: the Python standard library's own sources")
    corpus = _make_corpus(directory)

    _title(2, "A run spec: about 5 M parameters, trained for about " + clock(seconds))
    spec_path = directory / "run.yaml"
    runs = directory / "runs"
    if (runs / "demo").exists():
        last = RunDir(runs / "demo")
        last.open_for_training()  # not while another demo is training in it
        print(f"the run of the last demo is now {last.archive()}")
    steps = _write_spec(spec_path, runs, corpus, seconds)

    _title(3, "Training, killed half-way (SIGKILL), and resumed by the same command")
    started = time.monotonic()
    reached = _train_until_killed(spec_path, runs / "demo", steps // 2, seconds * 0.6)
    steps = _train_the_rest(spec_path, steps, reached, seconds, time.monotonic() - started)
    print(f"training took {clock(time.monotonic() - started)}")

    _title(4, "What it learned")
    _report(runs / "demo")

    _title(5, "What it writes after 'def '")
    _sample(runs / "demo")
    print(_next_commands(spec_path, runs / "demo", steps))


def _make_corpus(directory: Path) -> Path:
    name = f"python-{platform.python_version()}"
    corpus, source = directory / name, directory / f"{name}.jsonl"
    if (corpus / FILE_NAME).exists():
        print(f"{corpus} is there from the last demo")
        return corpus
    texts = list(_standard_library())
    with source.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    print(f"{source}: {len(texts):,} files, {source.stat().st_size:,} bytes")

    tokenizer = directory / "tokenizer.json"
    started = time.monotonic()
    tokenizer.write_text(train_bpe(_up_to(TOKENIZER_BYTES, texts), VOCABULARY), encoding="utf-8")
    print(f"{tokenizer}: byte-level BPE of {VOCABULARY:,}, trained in {clock(time.monotonic() - started)}")
    made = prepare([str(source)], load_tokenizer(str(tokenizer)), corpus, PrepareOptions())
    for directory, manifest in (made or {}).items():
        print(describe(manifest, directory))
    return corpus


def _standard_library() -> Iterator[str]:
    """Source files in an order that is random but the same each time, so that the validation split is a fair one."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    skipped |= {"encodings", "pydoc_data"}  # tables of characters and of help texts rather than programs
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    files.sort(key=lambda path: derive_seed(0, "demo", path.relative_to(root).as_posix()))
    readable = (text for path in files if (text := _read(path)))
    yield from _up_to(CORPUS_BYTES, readable)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _up_to(size: int, texts: Iterator[str] | list[str]) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text


def _write_spec(path: Path, runs: Path, corpus: Path, seconds: int) -> int:
    """Choose the number of steps that fits the time on this machine, and write the run spec."""

    def write(steps: int) -> None:
        every = max(5, steps // 10)
        text = RUN_SPEC.format(
            path=path, runs=runs, corpus=corpus, vocabulary=VOCABULARY, steps=steps,
            warmup=max(1, steps // 10), eval_every=every, save_every=every,
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")

    write(1000)
    step_s = _seconds_per_step(path)
    steps = max(40, min(2000, int(seconds / step_s) // 10 * 10))
    write(steps)
    print(f"{path}: {steps} steps of {step_s:.2f} s on this machine\n")
    print(path.read_text(encoding="utf-8"))
    return steps


def _seconds_per_step(path: Path) -> float:
    from argosy.train.bench import seconds_per_step

    return seconds_per_step(resolve(path).spec, steps=4)


def _command(path: Path, *overrides: str) -> list[str]:
    print(f"$ argosy train {' '.join([str(path), *overrides])}", flush=True)
    return [sys.executable, "-m", "argosy", "train", str(path), *overrides]


def _train_until_killed(path: Path, run: Path, at_step: int, most_seconds: float) -> int:
    """Kill the training at a step, or when its time is up on a machine that became slower; not before there is a checkpoint
    to resume from, which may take a slow disk longer. Returns the step."""
    process = subprocess.Popen(_command(path))
    started, step = time.monotonic(), 0
    try:
        while process.poll() is None and (
            not any((run / "checkpoints").glob("step-*"))
            or (step < at_step and (step < 10 or time.monotonic() - started < most_seconds))
        ):
            time.sleep(0.2)
            step = max(read_metrics(run / "metrics.jsonl"), default=0)
        process.send_signal(signal.SIGKILL)
        process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # the killed process could not put its terminal back
    print(f"{show_cursor}\n^^^ killed at about step {step} (exit status {process.returncode})\n", flush=True)
    return step


def _train_the_rest(path: Path, steps: int, reached: int, seconds: int, used: float) -> int:
    """The same command again. Where the machine turned out much slower or faster than when it was measured, the length
    is changed, and that is said. Returns the number of steps."""
    overrides = []
    left, pace = seconds - used, used / max(1, reached)
    if not 0.6 * left < (steps - reached) * pace < 1.3 * left:
        steps = reached + max(10, int(0.8 * left / pace))
        overrides = [f"train.steps={steps}"]
        print(f"this machine is not as fast as when it was measured, or faster: {steps} steps instead")
    code = subprocess.run(_command(path, *overrides), check=False).returncode
    if code:
        sys.exit(code)
    return steps


def _report(run: Path) -> None:
    from argosy.data.open import open_data
    from argosy.train.evaluate import evaluate_run, unigram_entropy

    metrics = read_metrics(run / "metrics.jsonl")
    losses = [(float(step), record["loss"]) for step, record in metrics.items() if "loss" in record]
    validation = [(float(step), r["validation_loss"]) for step, r in metrics.items() if "validation_loss" in r]
    width = max(40, min(72, shutil.get_terminal_size().columns - 12))
    print(plot(losses, marks=validation, width=width, y_label="loss (nats a token); ● validation", x_label="steps"))
    spec = RunDir(run).load_spec()
    entropy = unigram_entropy(open_data(spec).whole("validation"), spec.model.vocab_size)
    result, step = evaluate_run(str(run), split="validation", batches=None)
    print(f"\nvalidation loss after step {step}: {result.loss:.3f} nats a token over {result.tokens:,} tokens")
    print(f"unigram entropy of the same text:  {entropy:.3f} (the best a model without context can do)")
    if result.loss > entropy - 0.5:
        print("not well below it yet: this machine had time for few steps; `argosy demo --seconds 180` gives it more")


def _sample(run: Path) -> None:
    from argosy.train.decoding import Sampling
    from argosy.train.generate import sample

    text = sample(str(run), "def ", Sampling(tokens=120, temperature=0.6, seed=7))
    print("\n".join(f"  | {line}" for line in text.splitlines()))


def _next_commands(spec: Path, run: Path, steps: int) -> str:
    argosy = "argosy" if shutil.which("argosy") else f"{os.path.relpath(Path(sys.executable).parent)}/argosy"
    rows = [
        (f"sample {run} --prompt 'import '", "more of what it writes"),
        (f"eval {run}", "its loss on held-out text"),
        (f"train {spec} train.steps={2 * steps}", "go on training the same run"),
        (f"config show {spec}", "every value and where it came from"),
        ("config models", "real models, with their true sizes"),
        ("data prepare FILES --tokenizer T --output DIR", "your own text"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\n".join(["", "Next:", *(f"  {argosy} {command:<{width}}   {what}" for command, what in rows)])


def _title(number: int, text: str) -> None:
    print(f"\n── {number}/5 {text} {'─' * max(0, 72 - len(text))}", flush=True)

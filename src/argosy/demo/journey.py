"""The steps of `argosy demo`, within a given time.

The corpus is generated on the spot, so nothing is downloaded. Training runs as `argosy train` in a child process, which is
killed half-way with SIGKILL and started again by the same command.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.config.resolve import resolve
from argosy.console.braille_plot import plot
from argosy.console.formats import clock
from argosy.console.output import say
from argosy.data.corpus.corpus_manifest import FILE_NAME
from argosy.data.prepare.job import prepare
from argosy.data.prepare.prepare_report import describe
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.tokenizer import load_tokenizer, train_bpe
from argosy.demo.sizes import FEWEST_STEPS, Size, choose_size, steps_within
from argosy.demo.stories import OPENING, stories
from argosy.record.jsonl import read_metrics
from argosy.record.rundir import RunDir

if TYPE_CHECKING:
    from argosy.model.decoding import Sampling

VOCABULARY = 1024
STORIES = 6000
SAMPLE_TOKENS = 90
# Time for the final evaluation and sample, in steps.
TAIL_STEPS = 25
# The replacement character, for bytes that are no valid text.
REPLACEMENT = "\ufffd"
RUN_SPEC = """\
# Written by `argosy demo`. Change it, rename the run, and train your own: argosy train {path}
name: demo
runs_dir: {runs}
model:
  family: llama
  layers: {size.layers}
  hidden: {size.hidden}
  heads: {size.heads}
  vocab_size: {vocabulary}
data:
  train: {corpus}
  split: [99, 1, 0]
  seq_len: 128
train:
  global_batch: {size.global_batch}
  steps: {steps}
optim:
  lr: {size.lr}
  schedule: wsd          # stays at the peak, then falls: the run may be lengthened before that
  warmup: {warmup}
  decay: {decay}
eval:
  every: {every}
  batches: 4
checkpoint:
  every: {save_every}
log:
  every: 5
"""


@dataclass
class Pace:
    """The time that the demo may take, and what is left of it.

    start_s: seconds from the start of a training process to its first step.
    one_thread: more threads would mostly wait for each other, because the model is small or the cores are busy.
    """

    seconds: float
    start_s: float = 0.0
    one_thread: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)


def run_demo(directory: Path, seconds: int) -> None:
    """Run the demo, in the order a user would."""
    pace = Pace(seconds)
    directory.mkdir(parents=True, exist_ok=True)
    _title(1, "A corpus: small stories, written on the spot")
    corpus = _make_corpus(directory)

    _title(2, f"A run spec: a model sized to this machine, all within about {clock(seconds)}")
    spec_path = directory / "run.yaml"
    runs = directory / "runs"
    if (runs / "demo").exists():
        last = RunDir(runs / "demo")
        # Refuses if another demo is training in it.
        last.open_for_training()
        say(f"the run of the last demo is now {last.archive()}")
    steps = _write_spec(spec_path, runs, corpus, pace)
    before = _untrained(spec_path)

    _title(3, "Training, killed half-way (SIGKILL), and resumed by the same command")
    started = time.monotonic()
    reached = _train_until_killed(spec_path, runs / "demo", steps // 2, pace)
    steps = _train_the_rest(spec_path, runs / "demo", steps, reached, pace)
    say(f"training took {clock(time.monotonic() - started)}")

    _title(4, "What it learned")
    _report(runs / "demo")

    _title(5, f"What it writes after '{OPENING}'")
    say(side_by_side(("before training", before), (f"after {steps} steps", _sample(runs / "demo"))))
    say(_next_commands(spec_path, runs / "demo", steps))
    say(f"\nThe demo took {clock(pace.seconds - pace.left)}.")


def _make_corpus(directory: Path) -> Path:
    corpus, source = directory / "stories", directory / "stories.jsonl"
    if (corpus / FILE_NAME).exists():
        say(f"{corpus} is there from the last demo")
        return corpus
    texts = list(stories(STORIES))
    with source.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    say(f"{source}: {len(texts):,} stories, {source.stat().st_size:,} bytes. The first one:\n")
    say(textwrap.indent(textwrap.fill(texts[0], 76), "  | ") + "\n")

    tokenizer = directory / "tokenizer.json"
    started = time.monotonic()
    tokenizer.write_text(train_bpe(iter(texts), VOCABULARY), encoding="utf-8")
    say(f"{tokenizer}: byte-level BPE of {VOCABULARY:,}, trained in {clock(time.monotonic() - started)}")
    made = prepare([str(source)], load_tokenizer(str(tokenizer)), corpus, PrepareOptions())
    for directory, manifest in (made or {}).items():
        say(describe(manifest, directory))
    return corpus


def _write_spec(path: Path, runs: Path, corpus: Path, pace: Pace) -> int:
    """Choose a model and a number of steps that fit the time on this machine, and write the run spec."""

    def write(size: Size, steps: int) -> None:
        text = RUN_SPEC.format(
            path=path, runs=runs, corpus=corpus, vocabulary=VOCABULARY, steps=steps, size=size,
            warmup=max(1, steps // 20), decay=max(1, steps // 4), every=max(5, steps // 5),
            save_every=max(5, steps // 10),
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")

    started = time.monotonic()
    import torch

    from argosy.measure.step_bench import seconds_per_step

    # The import is most of a process's start time; the rest is opening data and model. There are two starts.
    pace.start_s = 1.5 * (time.monotonic() - started)

    def measure(size: Size) -> float:
        write(size, 1000)
        return seconds_per_step(resolve(path).spec, steps=3)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    size, step_s = choose_size(pace.left - 2 * pace.start_s, measure)
    if threads > 1:
        torch.set_num_threads(threads)
        together_s = measure(size)
        pace.one_thread = 1.33 * together_s > step_s
        step_s = step_s if pace.one_thread else together_s
        torch.set_num_threads(1 if pace.one_thread else threads)
    steps = steps_within(pace.left - 2 * pace.start_s - TAIL_STEPS * step_s, 1.1 * step_s)
    write(size, steps)
    say(f"{path}: {steps} steps of {step_s:.3f} s on this machine\n")
    say(path.read_text(encoding="utf-8"))
    return steps


def _start_training(path: Path, pace: Pace, *overrides: str) -> subprocess.Popen[bytes]:
    """Start `argosy train` as a child process, as a user would type it."""
    setting = {"OMP_NUM_THREADS": "1"} if pace.one_thread else {}
    words = [*(f"{key}={value}" for key, value in setting.items()), "argosy", "train", str(path), *overrides]
    say(f"$ {' '.join(words)}")
    return subprocess.Popen([sys.executable, "-m", "argosy", "train", str(path), *overrides], env=os.environ | setting)


def _train_until_killed(path: Path, run: Path, at_step: int, pace: Pace) -> int:
    """Start training and kill it at a step, or when its time is up on a slower machine. Returns the last logged step.

    The kill waits for the first checkpoint, which may take long on a slow disk.
    """
    most_seconds = 0.4 * pace.left
    process = _start_training(path, pace)
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
    # The killed process could not restore the terminal.
    show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
    say(f"{show_cursor}\n^^^ killed at about step {step} (exit status {process.returncode})\n")
    return step


def _train_the_rest(path: Path, run: Path, steps: int, reached: int, pace: Pace) -> int:
    """Run the same command again to the end. Returns the number of steps.

    If the machine is much slower or faster than when it was measured, the length is changed, with a message.
    """
    overrides = []
    step_s = _measured_step_s(run)
    if step_s is not None:
        left = pace.left - pace.start_s - TAIL_STEPS * step_s
        fits = reached + steps_within(left, 1.1 * step_s, fewest=max(10, FEWEST_STEPS - reached))
        if not 0.7 < (fits - reached) / max(1, steps - reached) < 1.5:
            faster = "faster" if fits > steps else "slower"
            say(f"the machine is {faster} now than when it was measured: {fits} steps instead of {steps}")
            steps = fits
            overrides = [f"train.steps={steps}", f"optim.decay={max(1, (steps - reached) // 2)}"]
    code = _start_training(path, pace, *overrides).wait()
    if code:
        sys.exit(code)
    return steps


def _measured_step_s(run: Path) -> float | None:
    """Return the seconds a step took in the run so far, with data, saves and evaluations; None if too few steps were logged."""
    times = [(step, record["time"]) for step, record in read_metrics(run / "metrics.jsonl").items() if "loss" in record]
    if len(times) < 2:
        return None
    (first, began), (last, ended) = times[0], times[-1]
    return float(ended - began) / (last - first)


def _report(run: Path) -> None:
    from argosy.data.open import open_data
    from argosy.infer.evaluate_run import evaluate_run, unigram_entropy

    metrics = read_metrics(run / "metrics.jsonl")
    losses = [(float(step), record["loss"]) for step, record in metrics.items() if "loss" in record]
    validation = [(float(step), r["validation_loss"]) for step, r in metrics.items() if "validation_loss" in r]
    width = max(40, min(72, shutil.get_terminal_size().columns - 12))
    say(plot(losses, marks=validation, width=width, y_label="loss (nats a token); ● validation", x_label="steps"))
    spec = RunDir(run).load_spec()
    entropy = unigram_entropy(open_data(spec).whole("validation"), spec.model.vocab_size)
    result, step = evaluate_run(str(run), split="validation", batches=None)
    bits = result.loss / math.log(2)
    say(
        f"\nvalidation loss after step {step}: {result.loss:.3f} nats a token over {result.tokens:,} tokens ({bits:.2f} bits)"
    )
    say(f"unigram entropy of the same text:  {entropy:.3f} (the best a model without context can do)")
    if result.loss > entropy - 0.5:
        say("not well below it yet: this machine had time for few steps; `argosy demo --seconds 180` gives it more")


def _sampling(tokens: int = SAMPLE_TOKENS) -> Sampling:
    from argosy.model.decoding import Sampling

    return Sampling(tokens=tokens, temperature=0.5, seed=7)


def _sample(run: Path) -> str:
    from argosy.infer.generate import sample

    return sample(str(run), OPENING, _sampling())


def _untrained(path: Path) -> str:
    """Return the text that the model of a run spec generates with its initial weights."""
    from argosy.data.open import open_data
    from argosy.measure.step_bench import start
    from argosy.model.decoding import generate
    from argosy.model.kv_cache import CachedTexts
    from argosy.train.device import prepare_device

    spec = resolve(path).spec
    device = prepare_device(spec.train)
    tokenizer = open_data(spec).tokenizer
    if tokenizer is None:
        raise AssertionError("the demo prepared its corpus with a tokenizer")
    engine, _ = start(spec, device)
    ids = tokenizer.encode(OPENING)
    options, limit = _sampling(SAMPLE_TOKENS // 2), spec.model.max_seq_len
    texts = CachedTexts(engine.model.eval(), limit=limit, most=len(ids) + options.tokens, device=device)
    [written] = generate(texts, [ids], options, stop=None)
    return tokenizer.decode(ids + written)


def side_by_side(*texts: tuple[str, str]) -> str:
    """Return titled texts in columns next to each other."""
    width = (max(60, min(100, shutil.get_terminal_size().columns)) - 4) // len(texts)
    columns = [
        [title, "─" * len(title), *textwrap.wrap(" ".join(_printable(text).split()), width - 2)]
        for title, text in texts
    ]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join("  | " + "".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows)


def _printable(text: str) -> str:
    """Return the text with a dot for each character that a terminal cannot show."""
    return "".join(c if c.isspace() or (c.isprintable() and c != REPLACEMENT) else "·" for c in text)


def _next_commands(spec: Path, run: Path, steps: int) -> str:
    argosy = "argosy" if shutil.which("argosy") else f"{os.path.relpath(Path(sys.executable).parent)}/argosy"
    rows = [
        (f"sample {run} --prompt '{OPENING}'", "more of what it writes"),
        (f"eval {run}", "its loss on held-out text"),
        (f"train {spec} train.steps={2 * steps}", "go on training the same run"),
        (f"config show {spec}", "every value and where it came from"),
        ("config models", "real models, with their true sizes"),
        ("data prepare FILES --tokenizer T --output DIR", "your own text"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\n".join(["", "Next:", *(f"  {argosy} {command:<{width}}   {what}" for command, what in rows)])


def _title(number: int, text: str) -> None:
    say(f"\n── {number}/5 {text} {'─' * max(0, 72 - len(text))}")

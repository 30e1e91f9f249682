"""The run spec that `argosy init` writes: a model, a batch and a length that suit this machine and a corpus.

The size follows from the work that the machine does in a first run (about 20 minutes on CPUs, 8 hours on GPUs) at 20 tokens a
parameter, or from the data, of which at most four epochs are read: beyond that, repeated tokens teach little. These are rules of
thumb for a start, not a plan: `argosy plan` predicts.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.console.formats import amount, clock
from argosy.data.corpus.corpus import Corpus, open_corpus
from argosy.data.corpus.corpus_manifest import FILE_NAME
from argosy.errors import ArgosyError
from argosy.host_cores import available_cores
from argosy.host_memory import available_memory
from argosy.plan.hardware import GIB, gpu_of_device
from argosy.plan.this_machine import local_gpus

CHINCHILLA = 20  # tokens per parameter
_EPOCHS = 4
_CPU_SECONDS, _GPU_SECONDS = 20 * 60, 8 * 3600
# Sustained FLOP/s of one core, and the share of a GPU's dense peak that a small model reaches.
_CORE_FLOPS, _GPU_SHARE = 1.5e10, 0.3
# Bytes of device memory for each parameter: weights, gradients, AdamW's state, and a margin for activations.
_BYTES_PER_PARAMETER = 24
# Layers, hidden size, heads, the longest sequence, tokens in a step, learning rate.
_SIZES = (
    (2, 64, 2, 128, 1 << 10, 6e-3),
    (4, 128, 4, 256, 1 << 11, 4e-3),
    (6, 256, 4, 256, 1 << 12, 2e-3),
    (8, 512, 8, 512, 1 << 15, 1e-3),
    (12, 768, 12, 1024, 1 << 17, 6e-4),
    (24, 1024, 16, 1024, 1 << 18, 4e-4),
    (24, 2048, 16, 2048, 1 << 19, 3e-4),
    (32, 4096, 32, 4096, 1 << 20, 3e-4),
)
_SPLITS = ((98, 2), (90, 10), (75, 25), (50, 50))


@dataclass(frozen=True)
class ThisMachine:
    """The devices of this machine: their number, their FLOP/s in training, and their memory in bytes, all together."""

    devices: int
    name: str
    flops: float
    memory: float
    seconds: float

    @classmethod
    def look(cls) -> ThisMachine:
        names = local_gpus() or []
        gpu = gpu_of_device(names[0]) if names else None
        if gpu is not None:
            count = len(names)
            return cls(count, names[0], count * gpu.peak() * 1e12 * _GPU_SHARE, count * gpu.memory * GIB, _GPU_SECONDS)
        cores = available_cores()
        return cls(1, f"{cores} CPU cores", cores * _CORE_FLOPS, available_memory() / 2, _CPU_SECONDS)


@dataclass(frozen=True)
class FirstSpec:
    """A run spec and what a person should know about it."""

    text: str
    # What was chosen and why, one line each.
    notes: list[str]
    ranks: int


def first_spec(corpus: Path | None, name: str, machine: ThisMachine, validation: Path | None = None) -> FirstSpec:
    """Return a commented run spec for this machine and a prepared corpus; without a corpus, for 10 million tokens of bytes.

    Without a corpus for `validation`, a share of the other is held back for it, if it is large enough.
    """
    found = None if corpus is None else _opened(corpus)
    tokens = 10_000_000 if found is None else found.tokens
    vocabulary = 257 if found is None else _vocabulary(found)
    size, model = _sized(machine, tokens, vocabulary)
    layers, hidden, heads, longest, step_tokens, lr = size
    parameters = count_parameters(model).total
    split, seq_len = (_SPLITS[0], longest) if found is None else _split(found, longest)
    if validation is not None:
        split, seq_len = (1, 0), _fitting(longest, _opened(validation), *([] if found is None else [found]))
    evaluates = split[1] > 0 or validation is not None
    trained = tokens * split[0] / sum(split)
    batch = max(1, step_tokens // seq_len // machine.devices) * machine.devices
    wanted = min(CHINCHILLA * parameters, _EPOCHS * trained)
    steps = max(20, math.ceil(wanted / (batch * seq_len)))
    estimate = 6 * parameters * steps * batch * seq_len / machine.flops
    epochs = steps * batch * seq_len / max(1, trained)
    keys = {
        "name": name, "layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "lr": f"{lr:g}",
        "parameters": amount(parameters), "corpus": _scalar(corpus or "corpus"), "tokens": amount(tokens), "seq_len": seq_len, "batch": batch,
        "step_tokens": f"{batch * seq_len:,}", "steps": steps, "seen": amount(steps * batch * seq_len), "epochs": f"{epochs:.2g}",
        "estimate": clock(estimate), "machine": machine.name if machine.devices == 1 else f"{machine.devices} x {machine.name}",
        "warmup": max(1, steps // 50), "save": max(1, steps // 5), "log": max(1, min(10, steps // 20)),
        "held_out": f"split: [{split[0]}, {split[1]}, 0]" if validation is None else f"validation: {_scalar(validation)}",
        "held_out_is": _SHARES if validation is None else "evaluated on; the whole of data.train is for training", "eval": _EVAL.format(every=max(1, steps // 10)) if evaluates else _NO_EVAL.format(why=_why_no_share(found)),
        "prepare": _PREPARE if corpus is None else "", "nproc": f" --nproc {machine.devices}" if machine.devices > 1 else "",
    }  # fmt: skip
    notes = [
        f"model   {keys['parameters']} parameters: {layers} layers of {hidden}, for {keys['machine']}",
        f"data    {keys['corpus']}: {keys['tokens']} tokens, {'assumed; ' if found is None else ''}its training share read {keys['epochs']} times",
        f"length  {steps:,} steps of {keys['step_tokens']} tokens, very roughly {keys['estimate']}",
    ]
    if not evaluates:
        notes.append(f"eval    off: {_why_no_share(found)}")
    text = _aligned(_TEMPLATE.format(**keys))
    # A name that no run can have is refused here, before the file is written.
    resolve(yaml.safe_load(text))
    return FirstSpec(text, notes, machine.devices)


def _aligned(text: str) -> str:
    """Move the comments beside keys to one column."""
    pairs = [(line, re.match(r"(\s*[^\s#].*?)\s+(# .*)", line)) for line in text.splitlines()]
    return "".join(f"{line if pair is None else f'{pair[1]:<25} {pair[2]}'}\n" for line, pair in pairs)


def _opened(path: Path) -> Corpus:
    try:
        return open_corpus(path)
    except ArgosyError:
        if not path.exists() or any(path.glob(f"*/{FILE_NAME}")) or any(path.glob("*.idx")):
            raise
        raise ArgosyError(
            "data.not-found",
            f"{path} is not a prepared corpus",
            key="CORPUS",
            value=str(path),
            fix=f"if it is text, prepare it first: argosy data prepare {path} --tokenizer bytes --output corpus (or, with words of "
            f"your own: argosy data train-tokenizer {path} --output tokenizer.json), then argosy init corpus",
        ) from None


def _scalar(value: object) -> str:
    """Return a text as YAML reads it back."""
    return str(value) if re.fullmatch(r"[A-Za-z_/][\w./-]*", str(value)) else json.dumps(str(value))


def _vocabulary(corpus: Corpus) -> int:
    return corpus.max_token() + 1 if corpus.manifest is None else corpus.manifest.tokenizer.vocab_size


def _sized(
    machine: ThisMachine, tokens: int, vocabulary: int
) -> tuple[tuple[int, int, int, int, int, float], ModelSpec]:
    """Return the largest size for the work, the data and the memory, at least the smallest."""
    by_work = math.sqrt(machine.flops * machine.seconds / (6 * CHINCHILLA))
    most = min(by_work, _EPOCHS * tokens / CHINCHILLA, machine.memory / _BYTES_PER_PARAMETER)
    chosen = None
    for size in _SIZES:
        layers, hidden, heads, longest, *_ = size
        keys = {"family": "llama", "layers": layers, "hidden": hidden, "heads": heads}
        model = resolve_model({**keys, "vocab_size": vocabulary, "max_seq_len": longest})
        if chosen is None or count_parameters(model).total <= most:
            chosen = size, model
    if chosen is None:
        raise AssertionError("there is a smallest size")
    return chosen


def _why_no_share(corpus: Corpus | None) -> str:
    if corpus is not None and corpus.documents == 1:
        return "the corpus is one document, of which no share can be held back: see data prepare --txt-unit"
    return "the corpus is too small for a validation share"


def _fitting(longest: int, *corpora: Corpus) -> int:
    """Return the sequence length, at most `longest`, of which every corpus has a sample."""
    return max(1, min(longest, *(corpus.tokens - 1 for corpus in corpora)))


def _split(corpus: Corpus, longest: int) -> tuple[tuple[int, int], int]:
    """Return the shares of training and validation and the sequence length, so that both have a sample; (1, 0) if none do."""
    seq_len = longest
    while seq_len >= 16:
        for shares in _SPLITS:
            parts = corpus.split((*shares, 0))
            if all(parts[name].tokens > seq_len for name in ("train", "validation")):
                return shares, seq_len
        seq_len //= 2
    return (1, 0), _fitting(longest, corpus)


_SHARES = "shares for training, validation and test; or data.validation: another corpus"
_PREPARE = """#   argosy data prepare my-texts/ --tokenizer bytes --output corpus
"""
_EVAL = """eval:
  every: {every}             # steps between two looks at the validation loss
  batches: 10
  # patience: 5           # stop after 5 evaluations without a lower loss"""
_NO_EVAL = "eval: off                # {why}"
_TEMPLATE = """\
# Written by `argosy init` for {machine} and {corpus} ({tokens} tokens).
{prepare}#   argosy train run.yaml --dry-run      check everything, write nothing
#   argosy train run.yaml{nproc}
# Any key can be changed on the command line (optim.lr=1e-3). All keys: `argosy config reference`.
name: {name}              # the run directory is runs/{name}
model:                    # {parameters} parameters; `argosy config models` lists presets, as `model: gpt2`
  family: llama
  layers: {layers}
  hidden: {hidden}
  heads: {heads}
  vocab_size: {vocabulary}
data:
  train: {corpus}
  {held_out}        # {held_out_is}
  seq_len: {seq_len}
train:
  global_batch: {batch}       # samples in a step: {step_tokens} tokens
  steps: {steps}              # {seen} tokens, {epochs} epochs; very roughly {estimate} here
optim:
  lr: {lr}                # the peak; try half and double
  warmup: {warmup}             # steps
  schedule: cosine
parallel: auto            # the layout for several GPUs; `argosy plan run.yaml` shows what it would be
{eval}
checkpoint:
  every: {save}              # steps; a run resumes from the newest with the same command
  keep: 2
  # best: validation_loss # also keep the one with the lowest validation loss
log:
  every: {log}
  # samples: {{every: {save}, prompts: ["Once upon a time"]}}
"""

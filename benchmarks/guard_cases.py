"""The runs of `benchmarks/guard.py`: corpora, healthy runs and faults to inject."""

from __future__ import annotations

import base64
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# -- corpora ------------------------------------------------------------------

DOCUMENTS = 1500
PYTHON_BYTES = 4_000_000


def make_corpora(root: Path) -> None:
    """Prepare byte-level corpora: Python sources, records, foreign text, noise, and a mixture with very unequal lengths."""
    from argosy.data.prepare.job import prepare
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.tokenizer import ByteTokenizer

    rng = np.random.default_rng(0)
    texts = {
        "python": list(_python()),
        "records": [_records(rng) for _ in range(DOCUMENTS)],
        "foreign": [_foreign(rng) for _ in range(DOCUMENTS // 3)],
        "noise": [_noise(rng) for _ in range(DOCUMENTS // 5)],
    }
    texts["mixture"] = list(_mixture(texts, rng))
    for name, documents in texts.items():
        if (root / name).exists():
            continue
        root.mkdir(parents=True, exist_ok=True)
        source = root / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        prepare([str(source)], ByteTokenizer(), root / name, PrepareOptions(workers=1))


def _python() -> Iterator[str]:
    left = PYTHON_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if (left := left - len(text)) < 0:
            return
        yield text


def _records(rng: np.random.Generator) -> str:
    """Return lines of one format, which are easy to learn."""
    names = ["anna", "boris", "chen", "devi", "emil", "fatou", "gita", "hugo"]
    rows = rng.integers(0, [8, 1000, 60, 24], size=(int(rng.integers(5, 40)), 4))
    lines = (f"{names[who]},{number:04d},{hour:02d}:{minute:02d},ok" for who, number, minute, hour in rows)
    return "name,number,time,state\n" + "\n".join(lines) + "\n"


def _foreign(rng: np.random.Generator) -> str:
    """Return words of a script whose bytes are in no other corpus."""
    first = int(rng.choice([0x0430, 0x4E00, 0x3042]))
    words = ["".join(chr(first + int(c)) for c in rng.zipf(1.6, 4) % 64) for _ in range(60)]
    return " ".join(words[int(n) % 60] for n in rng.zipf(1.3, int(rng.integers(50, 400))))


def _noise(rng: np.random.Generator) -> str:
    """Return text as in real corpora that is unpredictable (base64) or trivial (one repeated character)."""
    if rng.random() < 0.5:
        return base64.b64encode(rng.bytes(int(rng.integers(100, 3000)))).decode()
    return chr(int(rng.integers(33, 126))) * int(rng.integers(100, 4000))


def _mixture(texts: dict[str, list[str]], rng: np.random.Generator) -> Iterator[str]:
    kinds, shares = ["python", "records", "foreign", "noise"], [0.9, 0.06, 0.02, 0.02]
    for _ in range(2 * DOCUMENTS):
        documents = texts[kinds[int(rng.choice(4, p=shares))]]
        text = documents[int(rng.integers(len(documents)))]
        length = int(min(40 * (1 + rng.pareto(1.1)), 20_000))
        at = int(rng.integers(max(1, len(text) - length)))
        yield text[at : at + length]


# -- healthy runs -------------------------------------------------------------


def _batch(size: int, seq_len: int | None = None) -> list[str]:
    length = [] if seq_len is None else [f"data.seq_len={seq_len}", f"model.max_seq_len={seq_len}"]
    return [f"train.global_batch={size}", f"parallel.micro_batch={size}", *length]


BASE = [
    "model.family=llama", "model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab_size=300",
    "model.max_seq_len=64", "data.seq_len=64", "data.split=[100,0,0]", "data.train=CORPORA/python", *_batch(4),
    "optim.lr=1e-3", "eval=off", "checkpoint.every=1000000", "checkpoint.keep=1", "log.every=1",
]  # fmt: skip
_GPT, _NARROW = ["model.family=gpt"], ["model.hidden=32"]
_MOE = ["model.moe={experts: 4, top_k: 2, ffn: 64}"]
_BERT = ["model.family=bert", "data.bert={cls: 257, sep: 258, mask: 259, pad: 260}"]
_T5 = ["model.family=t5", "data.t5={sentinel: 299, sentinels: 30, eos: 257, pad: 258}"]
_RAMPUP_FROM_1 = "train.batch_rampup={start: 1, increment: 1, samples: 8000}"
_SMALL = ["model.hidden=32", "model.layers=1"]
_MIXTURE = ["data.train=CORPORA/mixture"]


def _blend(**weights: float) -> list[str]:
    sources = ", ".join(f"{{path: CORPORA/{name}, weight: {weight}}}" for name, weight in weights.items())
    return [f"data.train=[{sources}]"]


# The data of the run that a run with `init_from` starts from.
BEFORE = ["data.train=CORPORA/records"]


HEALTHY: dict[str, list[str]] = {
    "llama-seed-1": ["train.seed=1"],
    "llama-seed-2": ["train.seed=2"],
    "llama-seed-3": ["train.seed=3"],
    "gpt-batch-1": [*_GPT, *_batch(1)],
    "llama-batch-1-mixture": [*_batch(1), *_MIXTURE],
    "llama-batch-2-mixture": [*_batch(2), *_MIXTURE],
    "gpt-batch-8-dropout": [*_GPT, *_batch(8), "model.dropout=0.1"],
    "llama-batch-16-warmup": [*_batch(16, 32), "optim.warmup=50ba"],
    "gpt-batch-32": [*_GPT, *_NARROW, *_batch(32, 32), "optim.warmup=100ba"],
    "llama-high-lr": ["optim.lr=2e-2"],
    "gpt-high-lr-no-clip": [*_GPT, "optim.lr=1e-2", "optim.clip=null"],
    "llama-low-lr": ["optim.lr=3e-5"],
    "llama-long-warmup": ["optim.warmup=4000ba", "optim.lr=3e-3"],
    "gpt-long-warmup-batch-1": [*_GPT, *_batch(1), "optim.warmup=3000ba"],
    "llama-no-clip": ["optim.clip=null"],
    "llama-no-clip-batch-1": ["optim.clip=null", *_batch(1), *_MIXTURE],
    "moe": _MOE,
    "moe-batch-1": [*_MOE, *_batch(1)],
    "moe-bias-mixture": ["model.moe={experts: 8, top_k: 2, ffn: 32, balance_loss: 0.001, bias_rate: 0.001}", *_MIXTURE],
    "bert": [*_BERT, *_batch(8)],
    "bert-batch-1": [*_BERT, *_batch(1)],
    "t5": [*_T5, *_batch(4, 32)],
    "t5-batch-1-mixture": [*_T5, *_batch(1), *_MIXTURE],
    "fp16": ["train.precision=fp16", *_SMALL, *_batch(4, 32)],
    "fp16-batch-1-mixture": ["train.precision=fp16", *_SMALL, *_batch(1, 32), *_MIXTURE],
    "rampup": [*_batch(2), "train.global_batch=8", "train.batch_rampup={start: 2, increment: 2, samples: 16000}"],
    "rampup-from-1-mixture": [*_batch(1), "train.global_batch=4", _RAMPUP_FROM_1, *_MIXTURE],
    "blend-easy-and-foreign": [*_blend(records=0.97, foreign=0.03), *_batch(2)],
    "blend-rare-noise": [*_blend(records=0.99, noise=0.01), *_batch(1)],
    "blend-rare-foreign": [*_blend(python=0.998, foreign=0.002), *_batch(4)],
    "blend-rarest-batch-1": [*_blend(records=0.998, foreign=0.001, noise=0.001), *_batch(1)],
    "blend-rare-foreign-batch-1": [*_blend(python=0.997, foreign=0.003), *_batch(1)],
    "records-over-and-over": ["data.train=CORPORA/records", "optim.lr=3e-3", *_batch(8)],
    "from-trained-weights": ["init_from", *_batch(8, 32), *_MIXTURE],
    "from-trained-weights-1": ["init_from", *_batch(1), *_MIXTURE],
    "muon": ["optim.name=muon", "optim.lr=3e-3", *_batch(8)],
    "wsd": ["optim.schedule=wsd", "optim.decay=500ba", "optim.lr=3e-3"],
    "mpt-batch-2": ["model.family=mpt", *_batch(2)],
    "beta2-0.999-no-decay": ["optim.betas=[0.9,0.999]", "optim.weight_decay=0", *_batch(2)],
    "z-loss-bf16-like-eps": ["train.z_loss=1e-4", "optim.eps=1e-15", "optim.lr=5e-3"],
}  # fmt: skip


# -- faults -------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault that `hurt` injects into a step of a run with these keys.

    `lasts` is the number of steps that have the fault or are spoilt by it. `skipped`: the guard skips them; otherwise it only
    raises an alert.
    """

    keys: list[str]
    hurt: Callable[..., Any]
    lasts: int = 1
    rewinds: int = 0
    skipped: bool = True

    def plant(self, first: int, vocabulary: int) -> None:
        """Wrap the trainer's step to inject the fault once. After a rewind the same steps are healthy."""
        from argosy.train import loop

        take_step, planted = loop.take_step, set[int]()
        steps = range(first, first + (1 if self.rewinds else self.lasts))

        def faulty(engine: Any, optimizer: Any, batch: Any, *, step: int, **options: Any) -> Any:
            if step not in steps or step in planted:
                return take_step(engine, optimizer, batch, step=step, **options)
            planted.add(step)
            return self.hurt(partial(take_step, step=step, **options), engine, optimizer, batch, vocabulary)

        loop.take_step = faulty


def _noise_tokens(step: Any, engine: Any, optimizer: Any, batch: Any, vocabulary: int) -> Any:
    """Corrupt a batch: inputs and labels become random bytes."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, batch.tokens.shape)
    labels = np.where(batch.labels < 0, batch.labels, rng.integers(0, 256, batch.labels.shape))
    return step(engine, optimizer, replace(batch, tokens=tokens, labels=labels))


def _noise_labels(step: Any, engine: Any, optimizer: Any, batch: Any, vocabulary: int) -> Any:
    rng = np.random.default_rng(2)
    labels = np.where(batch.labels < 0, batch.labels, rng.integers(0, vocabulary, batch.labels.shape))
    return step(engine, optimizer, replace(batch, labels=labels))


def _on_gradients(change: Callable[[list[Any]], None]) -> Callable[..., Any]:
    """Return a fault that changes the gradients after the backward pass."""

    def hurt(step: Any, engine: Any, optimizer: Any, batch: Any, vocabulary: int) -> Any:
        forward_backward = engine.forward_backward

        def hurting(*arguments: Any) -> Any:
            result = forward_backward(*arguments)
            change([parameter.grad for parameter in engine.model.parameters() if parameter.grad is not None])
            return result

        engine.forward_backward = hurting
        try:
            return step(engine, optimizer, batch)
        finally:
            del engine.forward_backward

    return hurt


def _nan(gradients: list[Any]) -> None:
    gradients[0].view(-1)[0] = float("nan")


def _scale(factor: float, gradients: list[Any]) -> None:
    for gradient in gradients:
        gradient.mul_(factor)


def _flip(bit: int, tensor: Any) -> None:
    """Flip one bit of the largest fp32 number below 1, whose exponent begins with a 0."""
    import torch

    flat = tensor.detach().view(-1)
    at = torch.where(flat.abs() < 1, flat.abs(), 0).argmax()
    flat[at : at + 1].view(torch.int32).bitwise_xor_(1 << bit)


def _flip_gradient(bit: int, gradients: list[Any]) -> None:
    _flip(bit, max(gradients, key=lambda gradient: gradient.numel()))


def _flip_weight(step: Any, engine: Any, optimizer: Any, batch: Any, vocabulary: int) -> Any:
    """Flip a bit of a weight. It stays flipped, so only an earlier checkpoint helps."""
    named = {name: weight for name, weight in optimizer.weights().items() if "layers" in name and weight.ndim == 2}
    _flip(30, next(iter(named.values())))
    optimizer.write_parameters()
    return step(engine, optimizer, batch)


_SIXTEEN = _batch(16, 32)
FAULTS: dict[str, Fault] = {
    "nan-llama": Fault([], _on_gradients(_nan)),
    "nan-moe": Fault(_MOE, _on_gradients(_nan)),
    "scaled-65536-llama": Fault([], _on_gradients(partial(_scale, 65536.0))),
    "scaled-65536-gpt-batch-1": Fault([*_GPT, *_batch(1)], _on_gradients(partial(_scale, 65536.0))),
    "scaled-65536-t5": Fault([*_T5, *_SIXTEEN], _on_gradients(partial(_scale, 65536.0))),
    "flipped-gradient-llama": Fault([], _on_gradients(partial(_flip_gradient, 30))),
    "flipped-gradient-gpt": Fault(_GPT, _on_gradients(partial(_flip_gradient, 30))),
    "flipped-weight": Fault([], _flip_weight, lasts=8, rewinds=1),
    "flipped-weight-gpt": Fault(_GPT, _flip_weight, lasts=8, rewinds=1),
    "corrupted-batch-llama": Fault(_SIXTEEN, _noise_tokens),
    "corrupted-batch-gpt": Fault([*_GPT, *_SIXTEEN], _noise_tokens),
    "corrupted-batch-moe": Fault([*_MOE, *_SIXTEEN], _noise_tokens),
    "corrupted-batch-no-clip": Fault([*_SIXTEEN, "optim.clip=null"], _noise_tokens),
    "label-noise-burst-llama": Fault(_SIXTEEN, _noise_labels, lasts=4),
    "label-noise-burst-bert": Fault([*_BERT, *_batch(32, 32)], _noise_labels, lasts=4),
    "label-noise-burst-t5": Fault([*_T5, *_batch(16, 32)], _noise_labels, lasts=4, skipped=False),
}  # fmt: skip

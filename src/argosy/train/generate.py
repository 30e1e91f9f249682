"""Text from a trained run: one token after another, drawn from the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from argosy.config.seeds import derive_seed
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.errors import ArgosyError
from argosy.record.rundir import RunDir
from argosy.train.session import load_run


@dataclass(frozen=True)
class Sampling:
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def sample(path: Path, prompt: str, options: Sampling, device: str | None = None) -> str:
    """The prompt and what the newest checkpoint writes after it."""
    loaded = load_run(path, device=device)
    tokenizer = run_tokenizer(loaded.run)
    eod: int | None = loaded.run.data_facts().get("eod_id")
    prompt_ids = _encode(tokenizer, prompt)
    if not prompt_ids and eod is None:
        raise ArgosyError(
            "tokenizer.no-eod",
            "without an end-of-document token there is nothing to start from",
            key="--prompt",
            fix="give a --prompt",
        )
    ids = prompt_ids or [eod or 0]  # with no prompt, start as a document starts
    written = list(generate(loaded.model, ids, options, limit=loaded.spec.model.max_seq_len, stop=eod))
    return tokenizer.decode(prompt_ids + written)


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        return [int(i) for i in tokenizer.encode([prompt])[0]]
    except UnicodeEncodeError:
        raise ArgosyError(
            "config.bad-value", "the prompt is not UTF-8 text", key="--prompt", fix="check its encoding"
        ) from None


@torch.no_grad()
def generate(
    model: torch.nn.Module, ids: list[int], options: Sampling, *, limit: int, stop: int | None
) -> Iterator[int]:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(derive_seed(options.seed, "sample"))
    history = list(ids)
    for _ in range(options.tokens):
        logits: Tensor = model(torch.tensor([history[-limit:]], device=device))[0, -1].float().cpu()
        token = choose(logits, options, generator)
        if token == stop:
            return
        history.append(token)
        yield token


def choose(logits: Tensor, options: Sampling, generator: torch.Generator) -> int:
    if options.temperature < 1e-4:  # as good as greedy, and dividing by it would overflow
        return int(logits.argmax())
    if options.top_k:
        values, tokens = logits.topk(min(options.top_k, len(logits)))
    else:
        values, tokens = logits, torch.arange(len(logits))
    probabilities = (values / options.temperature).softmax(-1)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def run_tokenizer(run: RunDir) -> Tokenizer:
    """The tokenizer a run keeps beside its checkpoints."""
    stored = run.tokenizer_file
    if stored is None:
        raise ArgosyError(
            "tokenizer.not-found",
            f"{run.root} was trained on a bare .bin/.idx pair and keeps no tokenizer",
            key="data.tokenizer",
            fix="name the tokenizer in the run spec as data.tokenizer and run `argosy train` on it again",
        )
    return load_tokenizer(str(stored))

"""Text from a trained run: one token after another, drawn from the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.checkpoint.source import Source
from argosy.config.seeds import derive_seed
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.train.session import load_model


@dataclass(frozen=True)
class Sampling:
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def sample(where: str, prompt: str, options: Sampling, device: str | None = None) -> str:
    """The prompt and what the newest checkpoint writes after it."""
    loaded = load_model(where, device=device)
    tokenizer = source_tokenizer(loaded.source)
    eod = loaded.source.eod_id
    prompt_ids = _encode(tokenizer, prompt)
    if not prompt_ids and eod is None:
        raise ArgosyError(
            "tokenizer.no-eod",
            "without an end-of-document token there is nothing to start from",
            key="--prompt",
            fix="give a --prompt",
        )
    ids = prompt_ids or [eod or 0]  # with no prompt, start as a document starts
    written = list(generate(loaded.model, ids, options, limit=loaded.source.model.max_seq_len, stop=eod))
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


def source_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer kept beside the weights."""
    found = source.tokenizer()
    if found is None:
        raise ArgosyError(
            "tokenizer.not-found",
            f"{source.root} keeps no tokenizer: a run on a bare .bin/.idx pair, or a model imported without one",
            key="data.tokenizer",
            fix="name the tokenizer in the run spec as data.tokenizer and run `argosy train` on it again; or put "
            f"tokenizer.json into {source.root}",
        )
    return found

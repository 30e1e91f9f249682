"""Autoregressive sampling: one token after another from the model's distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.config.seeds import derive_seed


@dataclass(frozen=True)
class Sampling:
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


@torch.no_grad()
def generate(
    model: Callable[..., Tensor],
    ids: list[int],
    options: Sampling,
    *,
    limit: int,
    stop: int | None,
    device: torch.device,
    beside: Callable[[range], Mapping[str, list[int]]] = lambda shown: {},
) -> Iterator[int]:
    """Yield tokens after `ids`. The model sees the last `limit` tokens, and the inputs that `beside` returns for their positions."""
    generator = torch.Generator().manual_seed(derive_seed(options.seed, "sample"))
    history = list(ids)
    for _ in range(options.tokens):
        shown = range(max(0, len(history) - limit), len(history))
        inputs = {name: torch.tensor([row], device=device) for name, row in beside(shown).items()}
        tokens = torch.tensor([history[shown.start :]], device=device)
        logits = model(tokens, **inputs)[0, -1].float().cpu()
        token = choose(logits, options, generator)
        if token == stop:
            return
        history.append(token)
        yield token


def choose(logits: Tensor, options: Sampling, generator: torch.Generator) -> int:
    # Such a temperature is greedy in effect, and dividing by it would overflow.
    if options.temperature < 1e-4:
        return int(logits.argmax())
    if options.top_k:
        values, tokens = logits.topk(min(options.top_k, len(logits)))
    else:
        values, tokens = logits, torch.arange(len(logits))
    probabilities = (values / options.temperature).softmax(-1)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])

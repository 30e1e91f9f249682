"""Autoregressive sampling: one token after another from the model's distribution, for a batch of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.config.seeds import derive_seed

# Maps texts to the logits of their next tokens [texts, vocab]. Every call passes the texts of the last call, one token longer.
NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. A temperature of 0 is greedy; `top_k` 0 and `top_p` 1 keep all tokens."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    # Sample among the likeliest tokens whose probabilities add up to this (nucleus sampling).
    top_p: float = 1.0

    @property
    def is_greedy(self) -> bool:
        # Dividing by such a temperature would overflow.
        return self.temperature < 1e-4

    @property
    def derived_seed(self) -> int:
        return derive_seed(self.seed, "sample")


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    options: Sampling,
    *,
    stop: int | None,
    vocabulary: int | None = None,
    ends: Callable[[int, Sequence[int]], bool] = lambda row, written: False,
    seeds: Sequence[int] | None = None,
    all_finished: Callable[[bool], bool] = lambda finished: finished,
) -> list[list[int]]:
    """Return the tokens written after each prompt.

    Every text has a generator of its own, so it does not depend on the other texts of the batch.

    Args:
        stop: the token that ends a text. It is not part of the result.
        vocabulary: the number of tokens. Later rows of the model's vocabulary are padding, which is never drawn. Default: all are tokens.
        ends: returns whether the tokens written so far end text `row`. All of them are part of the result.
        seeds: a seed for each text. Default: that of the options for all.
        all_finished: given whether this batch is finished, returns whether writing may stop. Called after every token.
    """
    texts = [list(prompt) for prompt in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    seeds = [options.derived_seed] * len(prompts) if seeds is None else seeds
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    unfinished = set(range(len(prompts)))
    for _ in range(options.tokens):
        for row, token in enumerate(choose(next_logits(texts)[:, :vocabulary], options, generators)):
            # A finished text goes on, unread, until the whole batch is finished.
            texts[row].append(token)
            if row not in unfinished:
                continue
            if token == stop:
                unfinished.remove(row)
                continue
            written[row].append(token)
            if ends(row, written[row]):
                unfinished.remove(row)
        if all_finished(not unfinished):
            break
    return written


def choose(logits: Tensor, options: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """Return one token for each row of logits [rows, vocab], drawn with the row's generator on the host."""
    if options.is_greedy:
        return logits.argmax(-1).tolist()
    logits = logits.float()
    tokens: Tensor | None = None
    if options.top_k or options.top_p < 1:
        logits, tokens = logits.topk(min(options.top_k or logits.shape[-1], logits.shape[-1]))
        tokens = tokens.cpu()
    probabilities = (logits.cpu() / options.temperature).softmax(-1)
    if options.top_p < 1:
        # Sorted by topk. A token stays if those before it have not reached top_p, and the first always does.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill((before >= options.top_p) & (before > 0), 0.0)
    drawn = [torch.multinomial(row, 1, generator=one) for row, one in zip(probabilities, generators, strict=True)]
    return [int(at if tokens is None else tokens[row, at]) for row, at in enumerate(drawn)]

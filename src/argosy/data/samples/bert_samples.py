"""BERT's samples: [CLS] A [SEP] B [SEP], with some tokens masked for the model to predict, and whether B follows A.

A and B are the two parts of a window of one document, split at the start of a random sentence, or at a random token if there
is none. The question about the pair:

    nsp   next sentence (BERT): for half of the samples B is taken from another document instead
    sop   sentence order (ALBERT, and what Megatron calls NSP): for half of the samples A and B are swapped
    none  nothing (RoBERTa): [CLS] A [SEP] with the whole window as A

An epoch visits every window of every document once, in the order of a keyed bijection. A sample is a pure function of
(seed, epoch, its place in the epoch). With probability `short_seq_prob` a sample is a random shorter part of its window, so
that the model sees all lengths. The rest of that window is not used in this epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.document_stream import DocumentSamples, Range, assemble
from argosy.data.samples.draws import Keys, fractions, sample_keys, words
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.order import Indices
from argosy.data.samples.windows import Batch, check_ids
from argosy.errors import ArgosyError
from argosy.families.architecture import PREDICTED_SHARE

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# Pair labels, as in Hugging Face's BERT and ALBERT.
FOLLOWS, DOES_NOT_FOLLOW = 0, 1
# Shares of the predicted positions that show [MASK] and a random token. The rest stay unchanged.
_MASKED, _REPLACED = 0.8, 0.1


@dataclass(frozen=True)
class MaskedBatch:
    """A batch of `count` samples. IGNORED labels do not count in the loss."""

    tokens: Rows  # [count, seq_len]
    # The original token at predicted positions, else IGNORED.
    labels: Rows  # [count, seq_len]
    # 1 for B and its [SEP], else 0.
    token_types: Rows  # [count, seq_len]
    # False for padding.
    padding_mask: Mask  # [count, seq_len]
    # IGNORED if there is no pair: with `pair: none`, or for a window of one token.
    pair_labels: Rows  # [count]

    @property
    def valid_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())

    def batch(self, predictions: int) -> Batch:
        """Return the model's batch, with labels at `predictions` positions per row, the most a row can have.

        The output head is large, and most positions are not masked.
        """
        predicted = np.argsort(self.labels == IGNORED, axis=1, kind="stable")[:, :predictions]
        inputs: dict[str, npt.NDArray[Any]] = {
            "token_types": self.token_types,
            "padding_mask": self.padding_mask,
            "predicted": predicted,
            "pair_labels": self.pair_labels,
        }
        return Batch(self.tokens, np.take_along_axis(self.labels, predicted, axis=1), inputs)


@dataclass(frozen=True)
class MaskedLM:
    """The settings from which samples are made. The defaults are BERT's."""

    seq_len: int
    vocab_size: int
    cls: int
    sep: int
    mask: int
    pad: int
    pair: Literal["nsp", "sop", "none"] = "nsp"
    # The share of the text's tokens to predict.
    mask_rate: float = PREDICTED_SHARE
    # The most tokens masked together. A run of n has a weight of 1 / n.
    max_ngram: int = 1
    short_seq_prob: float = 0.1
    # Random replacements are ids below this; None for the whole vocabulary.
    words: int | None = None

    def __post_init__(self) -> None:
        special = (self.cls, self.sep, self.mask, self.pad)
        if len(set(special[:3])) < 3 or min(special) < 0 or max(special) >= self.vocab_size:
            raise ArgosyError(
                "tokenizer.vocabulary",
                f"[CLS], [SEP], [MASK] and padding are {special}: the first three must differ, and all lie in the "
                f"vocabulary of {self.vocab_size:,}",
                fix="use a tokenizer with BERT's special tokens",
            )
        for key, rate, allowed in (
            ("data.bert.mask_rate", self.mask_rate, 0 < self.mask_rate <= 1),
            ("data.bert.short_seq_prob", self.short_seq_prob, 0 <= self.short_seq_prob <= 1),
        ):
            if not allowed:
                raise ArgosyError(
                    "config.bad-value", "it is a share", key=key, value=rate, fix="give a number between 0 and 1"
                )
        if self.max_ngram < 1:
            raise ArgosyError(
                "config.bad-value",
                "1 hides single tokens",
                key="data.bert.max_ngram",
                value=self.max_ngram,
                fix="give 1 or more",
            )
        if self.room < self.fewest:
            shape = "[CLS] + A + [SEP]" if self.pair == "none" else "[CLS] + A + [SEP] + B + [SEP]"
            raise ArgosyError(
                "config.arithmetic",
                f"{shape} is {self.seq_len - self.room + self.fewest} tokens at least",
                key="data.seq_len",
                value=self.seq_len,
                fix="give a longer data.seq_len; BERT uses 128 and 512",
            )

    @property
    def room(self) -> int:
        """The most tokens of text that fit into a sample."""
        return self.seq_len - (2 if self.pair == "none" else 3)

    @property
    def fewest(self) -> int:
        """The fewest tokens of text that a sample needs."""
        return 1 if self.pair == "none" else 2

    @property
    def predictions(self) -> int:
        """The most positions to predict in a sample."""
        return max(1, int(np.rint(self.mask_rate * self.room)))

    def hide(self, tokens: Rows, text: Mask, keys: Keys) -> tuple[Rows, Rows]:
        """Return the masked tokens and the labels, given one key per row. Only tokens of the text are masked. [count, seq_len]"""
        chosen = self.choose(text, keys)
        # `choose` uses the first half of the draws.
        draws = fractions(keys, 4 * tokens.shape[1])[:, 2 * tokens.shape[1] :]
        fate, replacement = np.split(draws, 2, axis=1)
        words = self.vocab_size if self.words is None else self.words
        special = sorted(id_ for id_ in {self.cls, self.sep, self.mask, self.pad} if id_ < words)
        random = (replacement * (words - len(special))).astype(np.int64)
        # In ascending order: each id at or above a special one moves up past it.
        for id_ in special:
            random += random >= id_
        shown = np.where(fate < _MASKED, self.mask, np.where(fate < _MASKED + _REPLACED, random, tokens))
        return np.where(chosen, shown, tokens), np.where(chosen, tokens, IGNORED)

    def choose(self, text: Mask, keys: Keys) -> Mask:
        """Return the positions to predict: exactly round(mask_rate x tokens of text) per row, but at least one.

        Positions are tried in random order. Each masks a run of up to `max_ngram` tokens to its right. The run ends early at
        the end of the budget, at the end of the segment, or at a run already masked.
        """
        length = text.shape[1]
        chosen = np.zeros(text.shape, bool)
        # Below 2^63, so that text sorts first.
        draws = words(keys, length) >> np.uint64(1)
        orders = np.argsort(np.where(text, draws, np.uint64(2**63)), axis=1, kind="stable")
        sizes = text.sum(axis=1)
        budgets = np.minimum(np.maximum(np.rint(self.mask_rate * sizes).astype(np.int64), 1), sizes)
        if self.max_ngram == 1:
            np.put_along_axis(chosen, orders, np.arange(length) < budgets[:, None], axis=1)
            return chosen
        weights = np.cumsum(1 / np.arange(1, self.max_ngram + 1))
        runs = 1 + np.searchsorted(weights / weights[-1], fractions(keys, 2 * length)[:, length:], side="right")
        for row, order, run, budget in zip(range(len(text)), orders, runs, budgets, strict=True):
            free, left = text[row].copy(), int(budget)
            for start in order:
                stretch = free[start : start + min(left, int(run[start]))]
                taken = len(stretch) if stretch.all() else int(np.argmin(stretch))
                chosen[row, start : start + taken] = True
                free[start : start + taken] = False
                left -= taken
                if not left:
                    break
        return chosen


class BertSamples(DocumentSamples):
    """The endless samples of one split of one corpus: sample i is number i % count of epoch i // count."""

    def __init__(self, corpus: Corpus, split: Split, task: MaskedLM, seed: int, *, ends_in_eod: bool) -> None:
        super().__init__(corpus, split, task.room, seed, ends_in_eod=ends_in_eod)
        self.task = task
        if task.pair == "nsp":
            self.windows.require_documents(2, "next-sentence prediction, which takes B from another document,")

    def batch(self, indices: Indices) -> Batch:
        return self.samples(indices).batch(self.task.predictions)

    def ranges(self, indices: Indices) -> list[Range]:
        return [part for first, second, _ in self._plans(indices) for part in (first, second) if part]

    def samples(self, indices: Indices) -> MaskedBatch:
        epochs, places = np.divmod(indices, self.count)
        plans = self._plans(indices)
        pairs = [(self.read(first), self.read(second)) for first, second, _ in plans]
        tokens, types, text = self._assemble(pairs)
        check_ids(tokens, self.task.vocab_size, self.name_of(indices))
        shown, labels = self.task.hide(tokens, text, sample_keys(self.seed, "bert-mask", epochs, places))
        used = [3 + len(a) + len(b) if len(b) else 2 + len(a) for a, b in pairs]
        return MaskedBatch(
            tokens=shown,
            labels=labels,
            token_types=types,
            padding_mask=np.arange(self.task.seq_len) < np.array(used, np.int64)[:, None],
            pair_labels=np.array([label for *_, label in plans], np.int64),
        )

    def _plans(self, indices: Indices) -> list[tuple[Range, Range, int]]:
        """Return the range of A, the range of B and the pair label of each sample."""
        epochs, places = np.divmod(indices, self.count)
        draws = fractions(sample_keys(self.seed, "bert-pair", epochs, places), 7)
        return [self._plan(int(w), *row.tolist()) for w, row in zip(self.order(indices), draws, strict=True)]

    def _plan(
        self, number: int, short: float, size: float, offset: float, pivot: float, follows: float, other: float,
        place: float,
    ) -> tuple[Range, Range, int]:  # fmt: skip
        """Return the range of A, the range of B and the pair label of a window, given random draws in [0, 1)."""
        task, window = self.task, self.windows.locate(number)
        start, end = window.start, window.end
        if short < task.short_seq_prob:
            target = task.fewest + int(size * (task.room - task.fewest + 1))
            start += int(offset * max(0, end - start - target + 1))
            end = min(end, start + target)
        if task.pair == "none" or end - start < 2:
            return range(start, end), range(0), IGNORED
        inside = window.sentences[(window.sentences > start) & (window.sentences < end)]
        cut = int(inside[int(pivot * len(inside))]) if len(inside) else start + 1 + int(pivot * (end - start - 1))
        first, second = range(start, cut), range(cut, end)
        if follows < 0.5:
            return first, second, FOLLOWS
        if task.pair == "sop":
            return second, first, DOES_NOT_FOLLOW
        return first, self._elsewhere(window.siblings, len(second), other, place), DOES_NOT_FOLLOW

    def _elsewhere(self, siblings: tuple[int, int], size: int, other: float, place: float) -> Range:
        """Return the range of up to `size` tokens of another document.

        Like the true B, it starts at a sentence, or at any token if the document has no sentence bounds. The way it is cut
        therefore does not reveal the answer.
        """
        first, last = siblings
        number = int(other * (self.count - (last - first)))
        window = self.windows.locate(number if number < first else number + last - first)
        if len(window.sentences):
            start = int(window.sentences[int(place * len(window.sentences))])
        else:
            start = window.start + int(place * (window.end - window.start))
        return range(start, min(start + size, window.document_end))

    def _assemble(self, pairs: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows, Mask]:
        """Return the padded tokens, their token types, and a mask that is True for text."""
        task = self.task
        parts = [[first, second] if len(second) else [first] for first, second in pairs]
        tokens, text = assemble(parts, task.seq_len, cls=task.cls, sep=task.sep, pad=task.pad)
        types = np.zeros_like(tokens)
        for row, (first, second) in enumerate(pairs):
            if len(second):
                types[row, 2 + len(first) : 3 + len(first) + len(second)] = 1
        return tokens, types, text

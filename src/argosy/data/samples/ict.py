"""Samples of the inverse cloze task (Lee et al., 2019): find the block of text that a sentence was taken from.

A block is a window of a document. Its query is one of the window's sentences, drawn at random. Usually the sentence is removed
from the block, so that the model must find the block by meaning. For a share `query_in_block` of the samples it stays, so that
the model also learns to match common words. A window without sentence bounds gives a random part of at most half of it.

    tokens         [CLS] block [SEP]
    query_tokens   [CLS] query [SEP]
    labels         a number for each block; equal numbers are the same block, which is not a negative for its own query
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.document_stream import DocumentSamples, Range, assemble
from argosy.data.samples.draws import fractions, sample_keys
from argosy.data.samples.order import Indices
from argosy.data.samples.windows import Batch, check_ids
from argosy.errors import ArgosyError

# [CLS] and [SEP].
_AROUND = 2
# The range of block numbers of one corpus.
_BLOCKS = 2**40


@dataclass(frozen=True)
class InverseCloze:
    """The settings from which samples are made. `seq_len` is the length of a block."""

    seq_len: int
    query_len: int
    vocab_size: int
    cls: int
    sep: int
    pad: int
    query_in_block: float = 0.1

    def __post_init__(self) -> None:
        for key, length in (("data.seq_len", self.seq_len), ("data.ict.query_len", self.query_len)):
            if length <= _AROUND:
                raise ArgosyError(
                    "config.arithmetic",
                    "[CLS] + text + [SEP] is 3 tokens at least",
                    key=key,
                    value=length,
                    fix="give a longer one; 256 for blocks and 64 for queries are usual",
                )


class ClozeSamples(DocumentSamples):
    """The inverse cloze samples of one split of the run's corpus `number`."""

    def __init__(
        self, corpus: Corpus, split: Split, task: InverseCloze, seed: int, *, number: int, ends_in_eod: bool
    ) -> None:
        super().__init__(corpus, split, task.seq_len - _AROUND, seed, ends_in_eod=ends_in_eod)
        self.task, self.number = task, number

    def batch(self, indices: Indices) -> Batch:
        task, plans = self.task, self._plans(indices)
        special = {"cls": task.cls, "sep": task.sep, "pad": task.pad}
        blocks = [np.concatenate([self.read(before), self.read(after)]) for before, after, _ in plans]
        tokens, _ = assemble([[block] for block in blocks], task.seq_len, **special)
        queries = [self.read(query) for *_, query in plans]
        query_tokens, _ = assemble([[query] for query in queries], task.query_len, **special)
        for rows in (tokens, query_tokens):
            check_ids(rows, task.vocab_size, self.name_of(indices))
        return Batch(
            tokens,
            self.number * _BLOCKS + self.order(indices),
            {
                "padding_mask": _filled([len(block) for block in blocks], task.seq_len),
                "query_tokens": query_tokens,
                "query_padding_mask": _filled([len(query) for query in queries], task.query_len),
            },
        )

    def ranges(self, indices: Indices) -> list[Range]:
        return [part for plan in self._plans(indices) for part in plan if part]

    def _plans(self, indices: Indices) -> list[tuple[Range, Range, Range]]:
        """Return the ranges of the block's two parts and of the query, for each sample."""
        epochs, places = np.divmod(indices, self.count)
        draws = fractions(sample_keys(self.seed, "ict", epochs, places), 2)
        return [self._plan(int(w), *row.tolist()) for w, row in zip(self.order(indices), draws, strict=True)]

    def _plan(self, number: int, place: float, stays: float) -> tuple[Range, Range, Range]:
        """Return the ranges of a block's two parts and of its query, given random draws in [0, 1)."""
        window, room = self.windows.locate(number), self.task.query_len - _AROUND
        size = window.end - window.start
        if len(window.sentences):
            bounds = [window.start, *window.sentences.tolist(), window.end]
            at = int(place * (len(bounds) - 1))
            sentence = range(bounds[at], bounds[at + 1])
        else:
            length = min(room, max(1, size // 2))
            start = window.start + int(place * (size - length + 1))
            sentence = range(start, start + length)
        query = sentence[:room]
        if stays < self.task.query_in_block or len(sentence) == size:
            return range(window.start, window.end), range(0), query
        return range(window.start, sentence.start), range(sentence.stop, window.end), query


def _filled(sizes: list[int], length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return the padding mask of rows with these sizes, False for padding. [count, length]"""
    return np.asarray(np.arange(length) < np.array(sizes, np.int64)[:, None] + _AROUND)

"""Samples made of documents rather than of the token stream: what BERT and inverse cloze have in common.

An epoch visits every window of every document once, in the order of a keyed bijection. A sample is a pure function of
(seed, epoch, its place in the epoch): where its parts lie is known without reading them, so that what comes next can be
announced to a corpus that has to be fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from argosy.config.seeds import derive_seed
from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.document_windows import DocumentWindows
from argosy.data.samples.order import Indices, permute
from argosy.data.samples.windows import Batch, Blended

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Range = range  # of tokens of a corpus


class DocumentSet(Protocol):
    """The samples of one corpus."""

    corpus: Corpus
    count: int

    def batch(self, indices: Indices) -> Batch: ...
    def ranges(self, indices: Indices) -> list[Range]:
        """What has to be read for them."""


class DocumentSamples:
    """The windows of one split of one corpus, without end: sample i is number i % count of epoch i // count."""

    def __init__(self, corpus: Corpus, split: Split, room: int, seed: int, *, ends_in_eod: bool) -> None:
        self.corpus, self.seed = corpus, seed
        self.windows = DocumentWindows(corpus, split, room, ends_in_eod=ends_in_eod)
        self.windows.require_documents(1, "a sample")
        self.count = self.windows.count

    def order(self, indices: Indices) -> Indices:
        """The window of each sample."""
        epochs, places = np.divmod(indices, self.count)
        windows = np.empty(len(indices), np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            windows[mine] = permute(places[mine], self.count, derive_seed(self.seed, "order", epoch))
        return windows

    def read(self, part: Range) -> Rows:
        if not part:
            return np.empty(0, np.int64)
        return self.corpus.read(part.start, len(part)).astype(np.int64)

    def name_of(self, indices: Indices) -> Callable[[int], str]:
        """Says where a row came from."""
        return lambda row: f"window {self.order(indices)[row]} of {self.corpus.path}"


class DocumentStream(Blended[DocumentSet]):
    """An endless, repeatable stream of samples from one or more corpora."""

    def batch(self, first: int, count: int) -> Batch:
        corpus, local = self.locate(np.arange(first, first + count, dtype=np.int64))
        return _interleave([self.sets[c].batch(local[corpus == c]) for c in np.unique(corpus)], corpus)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """(corpus, sample of it) of each sample index."""
        return self._blend.locate(indices)

    def prefetch(self, first: int, count: int) -> None:
        if not any(s.corpus.is_remote for s in self.sets):
            return
        corpus, local = self.locate(np.arange(first, first + count, dtype=np.int64))
        for c, s in enumerate(self.sets):
            s.corpus.prefetch([(part.start, len(part)) for part in s.ranges(local[corpus == c])])


def assemble(parts: Sequence[Sequence[Rows]], seq_len: int, *, cls: int, sep: int, pad: int) -> tuple[Rows, Mask]:
    """(rows of [CLS], each part and [SEP] behind it, padded; which of the tokens are text)  # [count, seq_len]"""
    shape = (len(parts), seq_len)
    tokens, text = np.full(shape, pad, np.int64), np.zeros(shape, bool)
    for row, texts in enumerate(parts):
        tokens[row, 0], at = cls, 1
        for part in texts:
            end = at + len(part)
            tokens[row, at:end], tokens[row, end], text[row, at:end] = part, sep, True
            at = end + 1
    return tokens, text


def _interleave(batches: Sequence[Batch], corpus: Indices) -> Batch:
    """One batch whose row i is the next one of the batch of `corpus[i]`; batches are in the order of their corpora."""
    if len(batches) == 1:
        return batches[0]
    rows = np.argsort(np.argsort(corpus, kind="stable"), kind="stable")  # where each row is when they lie end to end

    def join(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        return np.asarray(np.concatenate(arrays)[rows])

    return Batch(
        join([batch.tokens for batch in batches]),
        join([batch.labels for batch in batches]),
        {name: join([batch.inputs[name] for batch in batches]) for name in batches[0].inputs},
    )

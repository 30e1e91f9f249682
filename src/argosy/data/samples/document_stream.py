"""Sample streams built from documents instead of the packed token stream, shared by BERT and inverse cloze (ICT).

An epoch visits every window of every document once, shuffled by a keyed bijection. A sample is a pure function of (seed,
epoch, place in the epoch). The token ranges of a sample are known without reading it, so a remote corpus can prefetch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.document_windows import DocumentWindows
from argosy.data.samples.order import Indices, epoch_order
from argosy.data.samples.windows import Batch, Blended

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# A range of tokens of a corpus.
Range = range


class DocumentSet(Protocol):
    """The interface of the samples of one corpus."""

    corpus: Corpus
    count: int

    def batch(self, indices: Indices) -> Batch: ...
    def ranges(self, indices: Indices) -> list[Range]:
        """Return the token ranges that a batch of these samples reads."""


class DocumentSamples:
    """An endless sequence of the windows of one split of one corpus: sample i is number i % count of epoch i // count."""

    def __init__(self, corpus: Corpus, split: Split, room: int, seed: int, *, ends_in_eod: bool) -> None:
        self.corpus, self.seed = corpus, seed
        self.windows = DocumentWindows(corpus, split, room, ends_in_eod=ends_in_eod)
        self.windows.require_documents(1, "a sample")
        self.count = self.windows.count

    def order(self, indices: Indices) -> Indices:
        """Return the window of each sample index."""
        return epoch_order(indices, self.count, self.seed)

    def read(self, part: Range) -> Rows:
        """Read a range of tokens, which may be empty."""
        if not part:
            return np.empty(0, np.int64)
        return self.corpus.read(part.start, len(part)).astype(np.int64)

    def name_of(self, indices: Indices) -> Callable[[int], str]:
        """Return a function that describes where a row of a batch came from, for error messages."""
        return lambda row: f"window {self.order(indices)[row]} of {self.corpus.path}"


class DocumentStream(Blended[DocumentSet]):
    """An endless, reproducible stream of document samples from one or more corpora."""

    def batch(self, first: int, count: int) -> Batch:
        """Return samples first .. first + count - 1 of the stream."""
        corpus, local = self.locate(np.arange(first, first + count, dtype=np.int64))
        return _interleave([self.sets[c].batch(local[corpus == c]) for c in np.unique(corpus)], corpus)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return (corpus, sample of that corpus) of each sample index."""
        return self._blend.locate(indices)

    def prefetch(self, first: int, count: int) -> None:
        """Start downloading samples first .. first + count - 1 from remote corpora."""
        if not any(s.corpus.is_remote for s in self.sets):
            return
        corpus, local = self.locate(np.arange(first, first + count, dtype=np.int64))
        for c, s in enumerate(self.sets):
            s.corpus.prefetch([(part.start, len(part)) for part in s.ranges(local[corpus == c])])


def assemble(parts: Sequence[Sequence[Rows]], seq_len: int, *, cls: int, sep: int, pad: int) -> tuple[Rows, Mask]:
    """Build padded rows `[CLS] part [SEP] part [SEP] …`. Return the rows and a mask of the text tokens.  # [count, seq_len]"""
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
    """Interleave per-corpus batches: row i is the next row of the batch of `corpus[i]`. Batches are sorted by corpus."""
    if len(batches) == 1:
        return batches[0]
    # The place of each row in the concatenated batches.
    rows = np.argsort(np.argsort(corpus, kind="stable"), kind="stable")

    def join(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        return np.asarray(np.concatenate(arrays)[rows])

    return Batch(
        join([batch.tokens for batch in batches]),
        join([batch.labels for batch in batches]),
        {name: join([batch.inputs[name] for batch in batches]) for name in batches[0].inputs},
    )

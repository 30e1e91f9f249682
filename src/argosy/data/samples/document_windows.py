"""The documents of a split, cut into windows that never cross a document: what BERT's segment pairs are made of.

A document of n tokens becomes ceil(n / length) windows of nearly equal size, so that none is a useless rest of a token
or two, and every token lies in exactly one window. Where documents were prepared as sentences, a bound moves back to
the start of a sentence if the window it begins then still fits. How many windows a document has follows from its length
alone, so the only thing kept in memory is one running count for each document; the rest is looked up in the `.idx`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.corpus.indexed import IndexedReader
from argosy.data.samples.order import Indices
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) of the corpus, inside one document."""

    start: int
    end: int
    document_end: int
    sentences: Indices  # where sentences begin inside it, its own start left out
    siblings: tuple[int, int]  # the windows [first, last) of the same document


class DocumentWindows:
    """`ends_in_eod`: every document's last token is the end-of-document token, which is left out."""

    def __init__(self, corpus: Corpus, split: Split, length: int, *, ends_in_eod: bool) -> None:
        self.corpus, self.split, self.length = corpus, split, length
        self._left_out = int(ends_in_eod)
        self._first_documents = np.cumsum([0, *(shard.documents for shard in corpus.shards)])
        self._first_tokens = np.cumsum([0, *(shard.tokens for shard in corpus.shards)])
        sizes = np.concatenate([_document_sizes(shard) for shard in corpus.shards])[split.first : split.last]
        self._counts = np.cumsum(
            -(-np.maximum(sizes - self._left_out, 0) // length)
        )  # windows up to each document's end
        self.count = int(self._counts[-1]) if len(self._counts) else 0
        self.documents = int((sizes > self._left_out).sum())  # that have a window

    def require_documents(self, need: int, why: str) -> None:
        """Refuse a split with too few documents, with its numbers."""
        if self.documents >= need:
            return
        raise ArgosyError(
            "data.empty-split",
            f"the {self.split.name} split of {self.corpus.path} has {self.split.last - self.split.first:,} of "
            f"{self.corpus.documents:,} documents, {self.documents:,} of them with text; {why} needs {need}",
            key="data.split",
            fix=f"give {self.split.name} a larger share, or add data",
        )

    def locate(self, window: int) -> Window:
        document = int(np.searchsorted(self._counts, window, side="right"))
        first, last = int(self._counts[document - 1]) if document else 0, int(self._counts[document])
        start, sentences, size = self._document(document)
        pieces = last - first
        begin = self._bound(window - first, pieces, size, sentences)
        end = self._bound(window - first + 1, pieces, size, sentences)
        inside = sentences[np.searchsorted(sentences, begin, side="right") : np.searchsorted(sentences, end)]
        return Window(start + begin, start + end, start + size, start + inside, (first, last))

    def _document(self, document: int) -> tuple[int, Indices, int]:
        """Where it begins in the corpus, where its sentences begin in it, and how many tokens it has."""
        document += self.split.first
        at = int(np.searchsorted(self._first_documents, document, side="right")) - 1
        shard, within = self.corpus.shards[at], document - int(self._first_documents[at])
        first, last = (int(i) for i in shard.document_indices[within : within + 2])
        start = shard.token_at_document(within)
        sentences = shard.pointers[first:last] // shard.dtype.itemsize - start
        size = shard.token_at_document(within + 1) - start - self._left_out
        return int(self._first_tokens[at]) + start, sentences, size

    def _bound(self, window: int, pieces: int, size: int, sentences: Indices) -> int:
        """Where window `window` of `pieces` begins. It may be lengthened at its front by what an even share leaves
        free: that is less than half of `length`, and so less than the window before it has."""
        even = window * size // pieces
        if window in (0, pieces):
            return even
        free = self.length - -(-size // pieces)
        nearest = int(sentences[np.searchsorted(sentences, even, side="right") - 1])
        return nearest if nearest >= even - free else even


def _document_sizes(shard: IndexedReader) -> Indices:
    """Tokens of each document, without reading what lies between the bounds."""
    bounds = shard.document_indices
    starts = np.full(len(bounds), shard.tokens, np.int64)  # documents without sequences may end the file
    within = bounds < shard.sequences
    starts[within] = shard.pointers[bounds[within]] // shard.dtype.itemsize
    return np.diff(starts)

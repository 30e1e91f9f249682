"""Windows that never cross a document boundary, from which BERT's segment pairs are built.

A document of n tokens becomes ceil(n / length) windows of nearly equal size, so no window is a useless remainder of a token
or two, and every token lies in exactly one window. If documents were prepared as sentences, a boundary moves back to the
start of a sentence where the longer window still fits. The number of windows follows from a document's length alone, so
memory holds only one cumulative count per document; the rest is looked up in the `.idx`.
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
    """A window of one document: tokens [start, end) of the corpus."""

    start: int
    end: int
    document_end: int
    # The starts of sentences inside the window, without the window's own start.
    sentences: Indices
    # The windows [first, last) of the same document.
    siblings: tuple[int, int]


class DocumentWindows:
    """The windows of all documents of a split. With `ends_in_eod`, the last token of each document is an EOD and is left out."""

    def __init__(self, corpus: Corpus, split: Split, length: int, *, ends_in_eod: bool) -> None:
        self.corpus, self.split, self.length = corpus, split, length
        self._left_out = int(ends_in_eod)
        self._first_documents = np.cumsum([0, *(shard.documents for shard in corpus.shards)])
        self._first_tokens = np.cumsum([0, *(shard.tokens for shard in corpus.shards)])
        sizes = np.concatenate([document_sizes(shard) for shard in corpus.shards])[split.first : split.last]
        # The number of windows up to the end of each document.
        self._counts = np.cumsum(-(-np.maximum(sizes - self._left_out, 0) // length))
        self.count = int(self._counts[-1]) if len(self._counts) else 0
        # The number of documents that have a window.
        self.documents = int((sizes > self._left_out).sum())

    def require_documents(self, need: int, why: str) -> None:
        """Refuse a split with fewer than `need` documents. `why` names what needs them."""
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
        """Return the bounds of window number `window` of the split."""
        document = int(np.searchsorted(self._counts, window, side="right"))
        first, last = int(self._counts[document - 1]) if document else 0, int(self._counts[document])
        start, sentences, size = self._document(document)
        pieces = last - first
        begin = self._bound(window - first, pieces, size, sentences)
        end = self._bound(window - first + 1, pieces, size, sentences)
        inside = sentences[np.searchsorted(sentences, begin, side="right") : np.searchsorted(sentences, end)]
        return Window(start + begin, start + end, start + size, start + inside, (first, last))

    def _document(self, document: int) -> tuple[int, Indices, int]:
        """Return a document's first token in the corpus, the offsets of its sentences, and its length in tokens."""
        document += self.split.first
        at = int(np.searchsorted(self._first_documents, document, side="right")) - 1
        shard, within = self.corpus.shards[at], document - int(self._first_documents[at])
        first, last = (int(i) for i in shard.document_indices[within : within + 2])
        start = shard.token_at_document(within)
        sentences = shard.pointers[first:last] // shard.dtype.itemsize - start
        size = shard.token_at_document(within + 1) - start - self._left_out
        return int(self._first_tokens[at]) + start, sentences, size

    def _bound(self, window: int, pieces: int, size: int, sentences: Indices) -> int:
        """Return the start of window `window` of a document's `pieces` windows.

        The start may move back to the start of a sentence, by at most the room that an even division leaves free. That is
        less than half of `length`, so the window before it keeps some tokens.
        """
        even = window * size // pieces
        if window in (0, pieces):
            return even
        free = self.length - -(-size // pieces)
        nearest = int(sentences[np.searchsorted(sentences, even, side="right") - 1])
        return nearest if nearest >= even - free else even


def document_sizes(shard: IndexedReader) -> Indices:
    """Return the number of tokens of each document, from the index entries at the document bounds only."""
    bounds = shard.document_indices
    # Documents without sequences at the end of the file have no pointer: they start at its end.
    starts = np.full(len(bounds), shard.tokens, np.int64)
    within = bounds < shard.sequences
    starts[within] = shard.pointers[bounds[within]] // shard.dtype.itemsize
    return np.diff(starts)

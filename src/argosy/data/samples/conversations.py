"""Samples of conversations: whole conversations packed into rows of `seq_len` tokens, with loss on what the assistant wrote.

The sequences of a document alternate between context and what is learnt (`argosy.data.chat.chat_documents`). A conversation that
is longer than a row is cut there; one of which nothing to learn is left is left out. Each conversation of a row is a document of
its own: attention does not cross into another, and positions begin at 0. What is left of a row is padding, a document without
labels.

Which conversations share a row depends on the corpus, the row length and the seed. Each epoch visits every row once, in an order
of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from argosy.config.seeds import derive_seed
from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.document_windows import document_sizes
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.order import Indices, epoch_order
from argosy.data.samples.packing import pack
from argosy.data.samples.windows import Batch, check_ids
from argosy.errors import ArgosyError

_log = logging.getLogger(__name__)


class ConversationRows:
    """The rows of one split of one corpus: sample i is row number i % count of epoch i // count."""

    def __init__(
        self, corpus: Corpus, split: Split, seq_len: int, vocab_size: int, seed: int, *, packed: bool = True
    ) -> None:
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self._vocab_size = vocab_size
        sizes, context = conversation_sizes(corpus)
        documents = np.arange(split.first, split.last, dtype=np.int64)
        kept = documents[context[documents] < np.minimum(sizes[documents], seq_len)]
        long = int((sizes[kept] > seq_len).sum())
        if long or len(kept) < len(documents):
            _log.info(
                "%s, %s: %d of %d conversations are cut at data.seq_len %d, and %d are left out, whose first answer begins after it",
                corpus.path, split.name, long, len(documents), seq_len, len(documents) - len(kept),
            )  # fmt: skip
        lengths = np.minimum(sizes[kept], seq_len)
        # Rows of one conversation each have no room for a second.
        room = seq_len if packed else 1
        order, self._starts = pack(lengths if packed else np.ones_like(lengths), room, derive_seed(seed, "pack"))
        self._documents = kept[order]
        self.count = len(self._starts) - 1
        if not self.count:
            raise ArgosyError(
                "data.empty-split",
                f"the {split.name} split of {corpus.path} has {len(documents):,} of {corpus.documents:,} conversations, none with an "
                f"answer within data.seq_len {seq_len}",
                key="data.split",
                fix=f"give {split.name} a larger share, add data, or lengthen data.seq_len"
                + ("; `eval: off` needs no validation split" if split.name == "validation" else ""),
            )

    def rows_of(self, indices: Indices) -> Indices:
        """Return the row of each sample index."""
        return epoch_order(indices, self.count, self.seed)

    def conversations(self, row: int) -> Indices:
        """Return the documents of a row, in the order they stand there."""
        return self._documents[self._starts[row] : self._starts[row + 1]]

    def batch(self, indices: Indices) -> Batch:
        shape = (len(indices), self.seq_len)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        documents, positions = np.empty(shape, np.int32), np.empty(shape, np.int64)
        rows = self.rows_of(indices)
        for number, row in enumerate(rows):
            at = 0
            found = self.conversations(int(row))
            for place, document in enumerate(found):
                text, learnt = read_conversation(self.corpus, int(document), self.seq_len)
                end = at + len(text)
                tokens[number, at:end] = text
                labels[number, at : end - 1] = np.where(learnt[1:], text[1:], IGNORED)
                documents[number, at:end], positions[number, at:end] = place, np.arange(len(text))
                at = end
            documents[number, at:], positions[number, at:] = len(found), np.arange(self.seq_len - at)
        check_ids(tokens, self._vocab_size, self._name_of(rows))
        return Batch(tokens, labels, {"documents": documents, "positions": positions})

    def ranges(self, indices: Indices) -> list[range]:
        bounds = [
            self.corpus.token_range(int(d)) for row in self.rows_of(indices) for d in self.conversations(int(row))
        ]
        return [range(start, min(end, start + self.seq_len)) for start, end in bounds]

    def _name_of(self, rows: Indices) -> Callable[[int], str]:
        return lambda number: (
            f"conversation {self.conversations(int(rows[number]))[0]} of {self.corpus.path} or one beside it"
        )


def conversation_sizes(corpus: Corpus) -> tuple[Indices, Indices]:
    """Return the tokens of each document, and how many of them come before the first that is learnt."""
    sizes = np.concatenate([document_sizes(shard) for shard in corpus.shards])
    # A document without tokens has no sequence. The 0 stands for one after the end of the file.
    lengths = [np.append(shard.lengths, 0)[shard.document_indices[:-1]] for shard in corpus.shards]
    return sizes, np.concatenate(lengths).astype(np.int64)


def read_conversation(corpus: Corpus, document: int, most: int) -> tuple[Indices, Indices]:
    """Return the first `most` tokens of a document, and which of them are learnt."""
    start, end = corpus.token_range(document)
    lengths = corpus.sequence_lengths(document)
    learnt = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)[:most]
    return corpus.read(start, min(end - start, most)).astype(np.int64), learnt

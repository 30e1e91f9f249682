"""What the records of an input become: documents of one or more sequences of tokens, for each column of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from argosy.data.corpus.indexed import Tokens
from argosy.data.text.blocks import Blocks, Piece
from argosy.data.text.engines import Encode
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import open_blocks
from argosy.data.text.records import Parsed, Sentences
from argosy.data.text.tokenizer import Lengths, Tokenizer

# The tokens of many documents back to back, the length of each sequence, and the number of sequences of each document.
Encoded = tuple[Tokens, Lengths, Lengths]
Parse = Callable[[Piece], Parsed[Any]]


@dataclass(frozen=True)
class Encoder:
    """What a maker of parts encodes texts with."""

    encode: Encode
    # The tokenizer itself. None: an engine runs it.
    tokenizer: Tokenizer | None
    vocab_size: int
    # The id that ends each document.
    eod: int | None


class Documents(Protocol):
    """The interface of a kind of documents."""

    def open(self, group: Sequence[InputFile]) -> tuple[Blocks, Parse]:
        """Open an input. Return its blocks, and the function that parses a piece of one."""

    def encode(self, documents: list[Any]) -> Encoded:
        """Return the tokens of parsed documents, of which there is at least one."""


class TextDocuments:
    """Documents of text: a sequence is a text, or a sentence where the text is a list of them."""

    def __init__(
        self, encode: Encode, eod: int | None, *, keys: Sequence[str], block_bytes: int, text_lines: bool
    ) -> None:
        self._encode, self._eod = encode, eod
        self._keys, self._block_bytes, self._text_lines = keys, block_bytes, text_lines

    def open(self, group: Sequence[InputFile]) -> tuple[Blocks, Parse]:
        blocks, parser = open_blocks(group, keys=self._keys, block_bytes=self._block_bytes, text_lines=self._text_lines)
        return blocks, parser.parse

    def encode(self, documents: list[Sentences]) -> Encoded:
        return encode_documents(documents, self._encode, self._eod)


def encode_documents(documents: Sequence[Sentences], encode: Encode, eod: int | None) -> Encoded:
    """Return the tokens of documents, each a list of sentences that ends with the end-of-document id, unless it is None."""
    ids, lengths = encode([sentence for document in documents for sentence in document])
    document_of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    # A text whose characters the tokenizer drops has no tokens, and becomes no sequence.
    filled = lengths > 0
    lengths = lengths[filled]
    per_document = np.bincount(document_of[filled], minlength=len(documents))
    # The last sequence of each document.
    last = np.cumsum(per_document)[per_document > 0] - 1
    return *_append_eod(ids, lengths, last, eod), per_document


def _append_eod(ids: Tokens, lengths: Lengths, last: Lengths, eod: int | None) -> tuple[Tokens, Lengths]:
    """Append the end-of-document id to the last sequence of each document."""
    if eod is None:
        return ids, lengths
    ends = np.cumsum(lengths)[last]
    lengths = lengths.copy()
    lengths[last] += 1
    out = np.empty(len(ids) + len(last), ids.dtype)
    eods = ends + np.arange(len(last))
    keep = np.ones(len(out), bool)
    keep[eods] = False
    out[keep] = ids
    out[eods] = eod
    return out, lengths

"""Conversations as documents of a corpus.

The sequences of a document alternate: the first is context, the second is learnt, the third is context, and so on. So the loss
mask lies in the `.idx` beside the tokens, where Megatron keeps the sentences of a document. It costs 12 bytes for each turn, and
everything that keeps a corpus (shards, hashes, merging, streaming) keeps the mask. No sequence is empty: nothing comes before the
first token of a conversation, so it cannot be learnt and always belongs to the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.chat.chat_records import CONVERSATION_KEYS, PREFERENCE_KEYS, conversation_of, preference_of
from argosy.data.chat.chat_template import ChatFormat, ChatTemplate, Rendered
from argosy.data.prepare.documents import Encoded, Parse
from argosy.data.text.blocks import Blocks, Piece
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import open_records
from argosy.data.text.records import Fault, Parsed, json_record, parse_piece
from argosy.data.text.tokenizer import Lengths, Placed, PlacesTokens
from argosy.errors import ArgosyError


class ChatDocuments:
    """The documents of conversations. Preferences have two columns: the chosen and the rejected conversation."""

    def __init__(self, format: ChatFormat, tokenizer: object, block_bytes: int) -> None:
        if not isinstance(tokenizer, PlacesTokens):
            raise ArgosyError(
                "tokenizer.not-found",
                "a SentencePiece model does not know the special tokens of a chat template",
                key="--tokenizer",
                fix="give the tokenizer.json of the model, or its directory",
            )
        self._tokenizer, self._block_bytes, self._pairs = tokenizer, block_bytes, format.pairs
        self._template = ChatTemplate(format)

    def open(self, group: Sequence[InputFile]) -> tuple[Blocks, Parse]:
        keys = PREFERENCE_KEYS if self._pairs else CONVERSATION_KEYS
        return open_records(group, keys=keys, block_bytes=self._block_bytes), self._parse

    def encode(self, documents: list[Rendered]) -> Encoded:
        placed = self._tokenizer.encode_placed([document.text for document in documents])
        sequences = [
            alternating(learnt_tokens(one, document.learnt)) for one, document in zip(placed, documents, strict=True)
        ]
        return (
            np.concatenate([ids for ids, _ in placed]),
            np.concatenate(sequences),
            np.array([len(lengths) for lengths in sequences], np.int64),
        )

    def _parse(self, piece: Piece) -> Parsed[Rendered]:
        return parse_piece(piece, 2 if self._pairs else 1, self._rendered)

    def _rendered(self, record: Any) -> list[Rendered]:
        value = json_record(record)
        found = preference_of(value) if self._pairs else (conversation_of(value),)
        rendered = [self._template.render(conversation) for conversation in found]
        if not all(one.text and one.learnt for one in rendered):
            raise Fault("no-answer", "the chat template writes nothing to learn")
        return rendered


def learnt_tokens(placed: Placed, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a text are learnt: those from the first to the last that share a character with a range."""
    _, offsets = placed
    learnt = np.zeros(len(offsets), bool)
    for first, last in spans:
        shared = np.flatnonzero((offsets[:, 0] < last) & (offsets[:, 1] > first))
        if len(shared):
            learnt[shared[0] : shared[-1] + 1] = True
    learnt[:1] = False
    return learnt


def alternating(learnt: npt.NDArray[np.bool_]) -> Lengths:
    """Return the lengths of the runs of equal values. The first run is of tokens that are not learnt."""
    if not len(learnt):
        return np.zeros(0, np.int64)
    changes = np.flatnonzero(learnt[1:] != learnt[:-1]) + 1
    return np.diff(np.concatenate(([0], changes, [len(learnt)]))).astype(np.int64)

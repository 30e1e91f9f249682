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
    """The documents of conversations. A preference is the chosen and the rejected conversation, each up to the end of its answer:
    four sequences."""

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

    def encode(self, documents: list[Sequence[Rendered]]) -> Encoded:
        parts = [part for document in documents for part in document]
        placed = self._tokenizer.encode_placed([part.text for part in parts])
        tokens, sequences = [], []
        for one, part in zip(placed, parts, strict=True):
            learnt = learnt_tokens(one, part.learnt)
            # In a pair, what follows the answer would be taken for the beginning of the other conversation.
            end = int(np.flatnonzero(learnt)[-1]) + 1 if self._pairs and learnt.any() else len(learnt)
            tokens.append(one[0][:end])
            sequences.append(alternating(learnt[:end]))
        each = 2 if self._pairs else 1
        of_document = [sum(len(s) for s in sequences[n : n + each]) for n in range(0, len(sequences), each)]
        return np.concatenate(tokens), np.concatenate(sequences), np.array(of_document, np.int64)

    def _parse(self, piece: Piece) -> Parsed[Sequence[Rendered]]:
        return parse_piece(piece, 1, self._rendered)

    def _rendered(self, record: Any) -> list[Sequence[Rendered]]:
        value = json_record(record)
        found = preference_of(value) if self._pairs else (conversation_of(value),)
        rendered = [self._template.render(conversation) for conversation in found]
        if not all(one.text and one.learnt for one in rendered):
            raise Fault("no-answer", "the chat template writes nothing to learn")
        if self._pairs and any(len(one.learnt) > 1 for one in rendered):
            raise Fault("turns", "the chat template marks the last turn in several parts")
        return [rendered]


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

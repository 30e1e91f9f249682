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

from argosy.data.chat.chat_records import CONVERSATION_KEYS, conversation_of
from argosy.data.chat.chat_template import ChatFormat, ChatTemplate, Rendered
from argosy.data.chat.preference_records import PREFERENCE_KEYS, preference_of
from argosy.data.prepare.documents import Encoded, Parse
from argosy.data.text.blocks import Blocks, Piece
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import open_records
from argosy.data.text.records import BadRecord, Fault, Parsed, each_record, json_record
from argosy.data.text.tokenizer import Ids, Lengths, Placed, PlacesTokens
from argosy.errors import ArgosyError

# The tokens of a conversation, and the lengths of its sequences.
Turns = tuple[Ids, Lengths]


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

    def encode(self, documents: list[Sequence[Turns]]) -> Encoded:
        parts = [part for document in documents for part in document]
        of_document = [sum(len(lengths) for _, lengths in document) for document in documents]
        return (
            np.concatenate([tokens for tokens, _ in parts]),
            np.concatenate([lengths for _, lengths in parts]),
            np.array(of_document, np.int64),
        )

    def _parse(self, piece: Piece) -> Parsed[Sequence[Turns]]:
        """Return the tokens of each record. They are made here, all at once, because a record may be bad for what they are."""
        found = list(each_record(piece, self._rendered))
        good = [one for one in found if not isinstance(one, BadRecord)]
        placed = iter(self._tokenizer.encode_placed([part.text for _, parts in good for part in parts]))
        documents: list[Sequence[Turns]] = []
        bad: list[BadRecord] = []
        for one in found:
            if isinstance(one, BadRecord):
                bad.append(one)
                continue
            place, parts = one
            document = [self._turns(next(placed), part) for part in parts]
            if all(len(lengths) == 2 or (len(lengths) > 2 and not self._pairs) for _, lengths in document):
                documents.append(document)
            else:
                bad.append(BadRecord(piece.file, place, "no-answer", "an answer has no tokens after the first one"))
        return [documents], bad

    def _turns(self, placed: Placed, part: Rendered) -> Turns:
        learnt = learnt_tokens(placed, part.learnt)
        # In a pair, what follows the answer would be taken for the beginning of the other conversation.
        end = int(np.flatnonzero(learnt)[-1]) + 1 if self._pairs and learnt.any() else len(learnt)
        return placed[0][:end], alternating(learnt[:end])

    def _rendered(self, record: Any) -> Sequence[Rendered]:
        value = json_record(record)
        found = preference_of(value) if self._pairs else (conversation_of(value),)
        rendered = [self._template.render(conversation) for conversation in found]
        if not all(one.learnt and all(first < last for first, last in one.learnt) for one in rendered):
            raise Fault("no-answer", "the chat template writes nothing to learn for an answer")
        if self._pairs and any(len(one.learnt) > 1 for one in rendered):
            raise Fault("turns", "the chat template marks the last turn in several parts")
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

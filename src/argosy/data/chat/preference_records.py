"""Read pairs of a chosen and a rejected answer from records, for preference tuning.

"chosen" and "rejected" are two whole conversations as lists of messages, or two answers, each a text or messages. The question of
answers is under the first of these keys that has one:

    prompt          a text or messages
    question        a text (orca_dpo_pairs); "system" beside it is the first message
    conversations   messages (ShareGPT)
    instruction     a text, with "input" and "history" (Alpaca)
    input           a text

Without any of them, texts must be transcripts as in HH-RLHF: "\\n\\nHuman: …\\n\\nAssistant: …".
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from argosy.data.chat.chat_records import (
    ASSISTANT,
    Conversation,
    Message,
    conversation,
    instruction_turns,
    read_messages,
    require_object,
)
from argosy.data.text.records import Fault

# Keys that hold the question, in the order in which they are looked for.
_QUESTIONS = ("prompt", "question", "conversations", "instruction", "input")
PREFERENCE_KEYS = ("chosen", "rejected", *_QUESTIONS, "history", "system", "tools")
_SPEAKER = re.compile(r"(?:^\s*|\n\n)(Human|Assistant):")
_SPEAKERS = ("Human", "Assistant")


def preference_of(record: Any) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a record. Raise `Fault` if it does not have both.

    Both learn the same way: the last turn of the assistant.
    """
    require_object(record)
    question = _question(record)
    both = []
    for key in ("chosen", "rejected"):
        found = conversation(_whole(record, key, question), record)
        if found.learnt[-1] != len(found.messages) - 1:
            raise Fault("no-answer", f"{key} does not end with a turn of the assistant")
        if all(message["role"] == "system" for message in found.messages[:-1]):
            raise Fault("no-prompt", f"nothing comes before the answer in {key}: {_wanted(record)}")
        both.append(Conversation(found.messages, found.learnt[-1:], found.tools))
    chosen, rejected = both
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise Fault("other-prompt", "chosen and rejected differ before their last turn")
    return chosen, rejected


class _Question(NamedTuple):
    """The messages before the answers of a pair, and the key that holds them."""

    key: str
    messages: list[Message]
    is_transcript: bool = False


def _question(record: dict[str, Any]) -> _Question:
    """Return the question of a record, without messages if no key has one."""
    given = [key for key in _QUESTIONS if record.get(key) is not None]
    key = next((key for key in given if record[key]), given[0] if given else "")
    if not key:
        return _Question(key, [])
    asked = record[key]
    if key == "instruction" or (key == "input" and isinstance(asked, str)):
        return _Question(key, instruction_turns(record))
    if not isinstance(asked, str) or key == "conversations":
        return _Question(key, read_messages(asked, key))
    turns = _transcript(asked, must_alternate=asked.rstrip().endswith("Assistant:"))
    if turns is None:
        return _Question(key, read_messages([{"role": "user", "content": asked}]))
    # A prompt of HH-RLHF ends where the answer begins.
    is_open = turns[-1] == {"role": ASSISTANT, "content": ""}
    if not is_open and turns[-1]["role"] == ASSISTANT:
        raise Fault(
            "no-prompt", f"{key} ends with a turn of the assistant, so it is no question to chosen and rejected"
        )
    return _Question(key, turns[:-1] if is_open else turns, is_transcript=True)


def _whole(record: dict[str, Any], key: str, question: _Question) -> list[Message]:
    """Return the messages of one conversation of a pair: the question and an answer."""
    answer = record.get(key)
    if answer is None:
        raise Fault("missing-key", f"no {key!r} among {', '.join(list(record)[:8])}")
    if not isinstance(answer, str):
        is_message = isinstance(answer, dict) and isinstance(answer.get("role") or answer.get("from"), str)
        return _joined(question, read_messages([answer] if is_message else answer, key))
    turns = _transcript(answer, must_alternate=not question.messages)
    if question.messages and (turns is None or not _begins_with(turns, question.messages)):
        text = answer.strip() if question.is_transcript else answer
        turns = read_messages([{"role": ASSISTANT, "content": text}])
    if turns is None and answer.startswith("["):
        turns = read_messages(answer, key)
    if turns is None:
        raise Fault("no-prompt", f"{key} is a text without a question: {_wanted(record)}")
    return _joined(question, turns)


def _joined(question: _Question, turns: list[Message]) -> list[Message]:
    """Return an answer after its question. Some data sets repeat the question in both conversations."""
    before = question.messages
    if not before or _begins_with(turns, before):
        return turns
    if question.key == "conversations" and before[-1]["role"] == ASSISTANT:
        raise Fault(
            "no-prompt", "conversations ends with a turn of the assistant, so it is no question to chosen and rejected"
        )
    answers = bool(turns) and turns[0]["role"] == ASSISTANT
    return [*before, *turns] if answers or question.key == "prompt" else turns


def _begins_with(turns: list[Message], before: list[Message]) -> bool:
    """Return whether turns begin with others, perhaps after a system message."""
    skip = int(bool(turns) and turns[0]["role"] == "system" != before[0]["role"])
    return turns[skip : skip + len(before)] == before


def _transcript(text: str, *, must_alternate: bool = True) -> list[Message] | None:
    """Return the turns of a transcript in the form of HH-RLHF, or None if the text is not one.

    Raises:
        Fault: the speakers do not take turns and `must_alternate`: one of the turns may quote a speaker.
    """
    _, *found = _SPEAKER.split(text)
    speakers, said = found[::2], found[1::2]
    if len(speakers) < 2 or not re.match(r"\s*Human:", text):
        return None
    for number, speaker in enumerate(speakers):
        if speaker != _SPEAKERS[number % 2]:
            if not must_alternate:
                return None
            raise Fault(
                "transcript", f"turn {number} of a transcript is of {speaker} again: turns cannot be told apart"
            )
    roles = ("user", ASSISTANT)
    turns = [{"role": roles[number % 2], "content": one.strip()} for number, one in enumerate(said)]
    return read_messages(turns)


def _wanted(record: dict[str, Any]) -> str:
    names = ", ".join(list(record)[:8])
    return f"none of {', '.join(_QUESTIONS)} among {names}, and no transcript (Human: …, Assistant: …)"

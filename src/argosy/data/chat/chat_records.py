"""Read conversations from records: OpenAI messages, ShareGPT and Alpaca, and pairs of answers for preference tuning.

The form is recognised by its keys, record by record:

    {"messages": [{"role": "user", "content": …}, …]}                  OpenAI messages; tools and tool calls are passed on
    {"conversations": [{"from": "human", "value": …}, …]}              ShareGPT; "system" beside it is the first message
    {"instruction": …, "input": …, "output": …}                        Alpaca; "input" and "system" may be missing

A preference has "chosen" and "rejected": two conversations as lists of messages, or two answers, as texts or messages, with the
question in "prompt".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from argosy.data.text.records import Fault, json_kind

Message = dict[str, Any]
# Keys and columns of the forms, in the order in which they are looked for.
CONVERSATION_KEYS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
PREFERENCE_KEYS = ("chosen", "rejected", "prompt", "system", "tools")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, and the tools that the assistant may call. `learnt` are the numbers of the messages to learn."""

    messages: list[Message]
    learnt: tuple[int, ...]
    tools: list[Any] | None = None


def conversation_of(record: Any) -> Conversation:
    """Return the conversation of a record. Raise `Fault` if it has none, or no turn of the assistant."""
    _require_object(record)
    if isinstance(record.get("instruction"), str):
        asked, more = record["instruction"], record.get("input")
        question = f"{asked}\n\n{more}" if more else asked
        turns: Any = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": record.get("output")}]
    else:
        turns = next((record[key] for key in ("messages", "conversations") if record.get(key) is not None), None)
        if turns is None:
            raise Fault(
                "missing-key", f"neither messages, conversations nor instruction among {', '.join(list(record)[:8])}"
            )
    return _conversation(_messages(turns), record)


def preference_of(record: Any) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a record. Raise `Fault` if it does not have both.

    Both learn the same way: the last turn of the assistant.
    """
    _require_object(record)
    asked = record.get("prompt")
    prompt = _messages([{"role": "user", "content": asked}] if isinstance(asked, str) else asked or [])
    both = []
    for key in ("chosen", "rejected"):
        answer = record.get(key)
        if answer is None:
            raise Fault("missing-key", f"no {key!r} among {', '.join(list(record)[:8])}")
        turns = _messages([{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer)
        # Some data sets repeat the prompt in both conversations.
        whole = turns if turns[: len(prompt)] == prompt else [*prompt, *turns]
        found = _conversation(whole, record)
        if found.learnt[-1] != len(found.messages) - 1:
            raise Fault("no-answer", f"{key} does not end with a turn of the assistant")
        both.append(Conversation(found.messages, found.learnt[-1:], found.tools))
    chosen, rejected = both
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise Fault("other-prompt", "chosen and rejected differ before their last turn")
    return chosen, rejected


def _conversation(messages: list[Message], record: dict[str, Any]) -> Conversation:
    system = record.get("system")
    if system and isinstance(system, str) and messages[:1] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    # OpenAI's weight: 0 keeps a turn of the assistant out of the loss.
    learnt = [n for n, one in enumerate(messages) if one["role"] == ASSISTANT and one.pop("weight", 1) != 0]
    if not learnt:
        raise Fault("no-answer", f"none of its {len(messages)} messages is a turn of the assistant to learn")
    return Conversation(messages, tuple(learnt), _tools(record.get("tools")))


def _tools(value: Any) -> list[Any] | None:
    """Return the tools. Data sets without nested columns keep them as JSON in a text; templates iterate over a list."""
    found = _from_json(value, "tools") if isinstance(value, str) and value else value
    if found and not isinstance(found, list):
        raise Fault("not-tools", f"tools is {json_kind(found)} where a list belongs")
    return found or None


def _tool_call(call: Any, number: int) -> Any:
    """Return a tool call whose arguments are an object. OpenAI writes them as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _from_json(function["arguments"], f"arguments of a tool call in message {number}")
    if not isinstance(arguments, dict):
        raise Fault("not-tools", f"a tool call in message {number} has {json_kind(arguments)} as arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _from_json(text: str, what: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Fault("not-tools", f"{what}: not JSON: {error}") from None


def _messages(turns: Any) -> list[Message]:
    if not isinstance(turns, list):
        raise Fault("not-messages", f"{json_kind(turns)} where a list of messages belongs")
    return [_message(turn, number) for number, turn in enumerate(turns)]


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise Fault("not-messages", f"message {number} is {json_kind(turn)}")
    # Parquet gives every row all fields of the column, as null where a message does not have one.
    fields = {key: value for key, value in turn.items() if value is not None}
    role = fields.pop("from", None) or fields.pop("role", None)
    if not isinstance(role, str):
        raise Fault("not-messages", f"message {number} has neither a role nor a `from`")
    content = fields.pop("value", None) if "content" not in fields else fields.pop("content")
    if isinstance(content, list):
        content = _joined(content, number)
    if not isinstance(content, str) and not (content is None and fields.get("tool_calls")):
        raise Fault("not-text", f"message {number} has {json_kind(content)} where text belongs")
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call, number) for call in fields["tool_calls"]]
    if content is not None and "\x00" in content:
        raise Fault("nul", f"message {number} has a NUL character at position {content.index(chr(0))}")
    return {"role": ROLES.get(role, role), "content": content or "", **fields}


def _joined(parts: list[Any], number: int) -> str:
    """Return the text of a message that is a list of parts."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Fault("not-text", f"message {number} has a part that is no text")
    return "".join(str(text) for text in texts)


def _require_object(record: Any) -> None:
    if not isinstance(record, dict):
        raise Fault("not-an-object", f"the record is {json_kind(record)}")

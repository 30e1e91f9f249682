"""Read conversations from records: OpenAI messages, ShareGPT and Alpaca.

The form is recognised by its keys, record by record:

    {"messages": [{"role": "user", "content": …}, …]}                  OpenAI messages; tools and tool calls are passed on
    {"conversations": [{"from": "human", "value": …}, …]}              ShareGPT; "system" beside it is the first message
    {"instruction": …, "input": …, "output": …}                        Alpaca; "input", "system" and "history" may be missing

Tables may hold a list of messages as JSON in a text, or as one list for each field: {"role": [...], "content": [...]}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from argosy.data.text.records import Fault, json_kind

Message = dict[str, Any]
# Keys and columns of the forms, in the order in which they are looked for.
CONVERSATION_KEYS = ("messages", "conversations", "instruction", "input", "output", "history", "system", "tools")
# Names of roles, in lower case, in which they are compared.
ROLES = {
    "system": "system", "tool": "tool",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, and the tools that the assistant may call. `learnt` are the numbers of the messages to learn."""

    messages: list[Message]
    learnt: tuple[int, ...]
    tools: list[Any] | None = None


def conversation_of(record: Any) -> Conversation:
    """Return the conversation of a record. Raise `Fault` if it has none, or no turn of the assistant."""
    require_object(record)
    key = next((key for key in ("messages", "conversations") if record.get(key)), None)
    if key is None and isinstance(record.get("instruction"), str):
        turns = [*instruction_turns(record), *read_messages([{"role": ASSISTANT, "content": record.get("output")}])]
        return conversation(turns, record)
    # An empty list is a conversation without a turn.
    key = key or next((key for key in ("messages", "conversations") if record.get(key) is not None), None)
    if key is None:
        raise Fault(
            "missing-key", f"neither messages, conversations nor instruction among {', '.join(list(record)[:8])}"
        )
    return conversation(read_messages(record[key], key), record)


def instruction_turns(record: dict[str, Any]) -> list[Message]:
    """Return the earlier turns and the question of a record in Alpaca's form."""
    parts = [record.get(key) for key in ("instruction", "input")]
    for key, part in zip(("instruction", "input"), parts, strict=True):
        if part is not None and not isinstance(part, str):
            raise Fault("not-text", f"{key} is {json_kind(part)} where text belongs")
    question = "\n\n".join(part for part in parts if part and not part.isspace())
    history = record.get("history") or []
    if isinstance(history, str):
        history = from_json(history, "not-messages", "history")
    turns: list[Message] = []
    for number, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Fault("not-messages", f"entry {number} of history is not a pair of a question and an answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": ASSISTANT, "content": pair[1]}]
    return read_messages([*turns, {"role": "user", "content": question}])


def conversation(messages: list[Message], record: dict[str, Any]) -> Conversation:
    """Return messages as a conversation, with the record's system message and tools. Raise `Fault` if nothing is to be learnt."""
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
    found = from_json(value, "not-tools", "tools") if isinstance(value, str) and value else value
    if found and not isinstance(found, list):
        raise Fault("not-tools", f"tools is {json_kind(found)} where a list belongs")
    return found or None


def _tool_call(call: Any, number: int) -> Any:
    """Return a tool call whose arguments are an object. OpenAI writes them as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = from_json(function["arguments"], "not-tools", f"arguments of a tool call in message {number}")
    if not isinstance(arguments, dict):
        raise Fault("not-tools", f"a tool call in message {number} has {json_kind(arguments)} as arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def from_json(text: str, kind: str, what: str) -> Any:
    """Return the value of JSON in a text. Raise `Fault` of a kind if the text is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Fault(kind, f"{what}: not JSON: {error}") from None


def read_messages(turns: Any, what: str = "the record") -> list[Message]:
    """Return a list of messages, whichever way the record holds it. Raise `Fault` if it is no list of messages."""
    if isinstance(turns, str):
        turns = from_json(turns, "not-messages", f"{what} is a text where a list of messages belongs")
    if isinstance(turns, dict) and any(isinstance(turns.get(key), list) for key in ("role", "from")):
        turns = _rows(turns, what)
    if not isinstance(turns, list):
        raise Fault("not-messages", f"{json_kind(turns)} where a list of messages belongs")
    return [_message(turn, number) for number, turn in enumerate(turns)]


def _rows(columns: dict[str, Any], what: str) -> list[Message]:
    """Return the messages of an object that has one list for each field, as `datasets` stores a sequence of objects."""
    lists = {key: values for key, values in columns.items() if values is not None}
    lengths = {key: len(values) if isinstance(values, list) else -1 for key, values in lists.items()}
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{key} {'no list' if size < 0 else size}" for key, size in lengths.items())
        raise Fault("not-messages", f"{what} has lists of different lengths: {sizes}")
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


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
    return {"role": ROLES.get(role.lower(), role), "content": content or "", **fields}


def _joined(parts: list[Any], number: int) -> str:
    """Return the text of a message that is a list of parts."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Fault("not-text", f"message {number} has a part that is no text")
    return "".join(str(text) for text in texts)


def require_object(record: Any) -> None:
    """Raise `Fault` unless a record is an object."""
    if not isinstance(record, dict):
        raise Fault("not-an-object", f"the record is {json_kind(record)}")

"""Chat templates: a conversation becomes one text, of which the assistant's turns are known.

The template is the tokenizer's own, a Jinja program that somebody else wrote. It runs in Jinja's sandbox, without the file
system, without imports and without attributes that start with an underscore, and within bounds of memory and time. It does not see
the clock: `strftime_now` is not defined, so that the same conversation always gives the same text.

The turns are found in one of two ways:

- A template with `{% generation %}` blocks marks them itself.
- Any other template is rendered once for each turn: the text up to a turn, with the generation prompt, and the text up to its end.
  Both must be beginnings of the whole text. A template that rewrites earlier turns (by dropping the reasoning of all but the last
  one, for instance) is refused: a model would learn answers to a prompt that it never sees. Some templates cannot render the text
  up to a turn: no message before the assistant's first, for instance. There a turn begins where its text depends on the answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.data.chat.chat_records import ASSISTANT, Conversation
from argosy.data.text.hub_names import PREFIX, as_path
from argosy.data.text.inputs import require
from argosy.data.text.records import Fault
from argosy.errors import ArgosyError
from argosy.files import local_path
from argosy.tasks.task import Task
from argosy.untrusted import MIB, read_object, read_regular

TEMPLATE_FILE = "chat_template.jinja"
# Characters of Unicode's private use planes: a generation block is rendered between them.
_BEGIN, _END = "\U000ffff0", "\U000ffff1"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MOST_BYTES = MIB
# Of one conversation as text.
_MOST_CHARACTERS = 16 << 20
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatFormat:
    """What turns conversations into texts: the template and the special tokens it names. `pairs`: records are preferences."""

    template: str
    tokens: tuple[tuple[str, str], ...] = ()
    pairs: bool = False

    def token(self, name: str) -> str | None:
        """Return the special token of a name such as eos_token, if the tokenizer's settings have it."""
        return dict(self.tokens).get(name)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the ranges of its characters that the model learns to write."""

    text: str
    learnt: list[Span]


def format_for(task: Task[Any], tokenizer: str, template: str | None) -> ChatFormat | None:
    """Return the chat format for the records of a task, or None if they are texts."""
    if task.records != "texts":
        return chat_format(tokenizer, None if template is None else Path(template), pairs=task.records == "preferences")
    if template is not None:
        raise ArgosyError(
            "config.conflict",
            f"a chat template is for conversations, and {task.name} is trained on texts",
            key="chat_template",
            value=template,
            fix="leave it out, or choose a task for conversations: sft",
        )
    return None


def chat_format(tokenizer: str, template: Path | None = None, *, pairs: bool = False) -> ChatFormat:
    """Return the chat format of a tokenizer.

    Args:
        tokenizer: its directory or a file in it, as `load_tokenizer` takes it.
        template: a file with another template than the tokenizer's own.
        pairs: records are preferences.
    """
    path = local_path(as_path(tokenizer) if tokenizer.startswith(PREFIX) else tokenizer)
    directory = path if path.is_dir() else path.parent
    settings: dict[str, Any] = {}
    # `bytes` names no file.
    if path.exists() and (directory / "tokenizer_config.json").exists():
        settings = _settings(directory / "tokenizer_config.json")
    own = directory / TEMPLATE_FILE
    found = template or (own if path.exists() and own.exists() else None)
    text = _named_template(settings.get("chat_template")) if found is None else _read(found)
    if text is None:
        raise ArgosyError(
            "data.bad-template",
            f"{tokenizer} has no chat template: neither {TEMPLATE_FILE} nor `chat_template` in a tokenizer_config.json beside it",
            key="--tokenizer",
            value=tokenizer,
            fix="give the directory of a chat model's tokenizer, or a template: --chat-template FILE.jinja",
        )
    values = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    return ChatFormat(text, tuple(sorted((key, value) for key, value in values.items() if value is not None)), pairs)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self._marks_turns = _GENERATION.search(format.template) is not None

    @cached_property
    def _compiled(self) -> Any:
        require("jinja2.sandbox", "sft", "a chat template")
        from jinja2 import TemplateSyntaxError

        from argosy.data.chat.bounded_sandbox import BoundedEnvironment
        from argosy.data.chat.generation_block import Generation

        environment: Any = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.marks = (_BEGIN, _END)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self._format.template)
        except TemplateSyntaxError as error:
            cause = f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            raise ArgosyError(
                "data.bad-template", cause, key="--chat-template", fix="correct it, or give another"
            ) from None

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation.

        Raises:
            Fault: the template refuses this conversation.
            ArgosyError: `data.bad-template`, the turns of the assistant cannot be told apart.
        """
        marked = self._text(conversation, len(conversation.messages))
        if not self._marks_turns:
            return Rendered(marked, [self._turn(conversation, number, marked) for number in conversation.learnt])
        written = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False, default=str)
        if _BEGIN in written or _END in written:
            raise Fault("reserved", "a message has a character of Unicode's private use that marks turns here")
        text, spans = _unmark(marked)
        answers = [n for n, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        if len(spans) == len(answers):
            spans = [span for span, number in zip(spans, answers, strict=True) if number in conversation.learnt]
        elif len(conversation.learnt) < len(answers):
            raise Fault(
                "turns", f"the template marks {len(spans)} turns of {len(answers)}, and only some are to be learnt"
            )
        return Rendered(text, spans)

    def _turn(self, conversation: Conversation, number: int, whole: str) -> Span:
        after = self._text(conversation, number + 1)
        try:
            before = self._text(conversation, number, prompt=True)
            if number == 0 and not after.startswith(before):
                before = self._independent(conversation, number, after)
        except Fault:
            before = self._independent(conversation, number, after)
        if whole.startswith(after) and after.startswith(before):
            return len(before), len(after)
        differs = before if not after.startswith(before) else after
        place = _shared(differs, whole)
        raise ArgosyError(
            "data.bad-template",
            f"the chat template rewrites earlier turns: rendered up to message {number}, a conversation reads "
            f"{differs[max(0, place - 20) : place + 20]!r}, and as a whole {whole[max(0, place - 20) : place + 20]!r}",
            key="--chat-template",
            fix="give a template that only appends, or that marks the turns with {% generation %}: --chat-template FILE.jinja",
        )

    def _independent(self, conversation: Conversation, number: int, text: str) -> str:
        """Return the beginning of a text, which ends with a turn, that is the same for another answer."""
        other = {"role": ASSISTANT, "content": _BEGIN}
        changed = self._text(replace(conversation, messages=[*conversation.messages[:number], other]), number + 1)
        return text[: _shared(text, changed)]

    def _text(self, conversation: Conversation, messages: int, *, prompt: bool = False) -> str:
        template = self._compiled
        template.environment.begin()
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(
                messages=conversation.messages[:messages],
                tools=conversation.tools,
                add_generation_prompt=prompt,
                **dict(self._format.tokens),
            ):
                pieces.append(piece)
                size += len(piece)
                if size > _MOST_CHARACTERS:
                    raise Fault("template", f"the chat template writes more than {_MOST_CHARACTERS:,} characters")
        except Fault:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise whatever Python does
            why = str(error) or type(error).__name__
            raise Fault("template", f"the chat template fails: {why}") from None
        return "".join(pieces)


def _shared(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    places = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in places if a != b), min(len(one), len(other)))


def _unmark(marked: str) -> tuple[str, list[Span]]:
    """Return a text without the marks of its generation blocks, and the ranges between them that are not empty."""
    pieces, spans, at = [], [], 0
    for number, piece in enumerate(re.split(f"[{_BEGIN}{_END}]", marked)):
        if number % 2 and piece:
            spans.append((at, at + len(piece)))
        pieces.append(piece)
        at += len(piece)
    if marked.count(_BEGIN) != marked.count(_END) or marked.count(_BEGIN) * 2 + 1 != len(pieces):
        raise Fault("template", "generation blocks of the chat template are nested or cut")
    return "".join(pieces), spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return a value as JSON, without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ArgosyError(
            "tokenizer.not-found", f"{path} cannot be read: {error}", fix="copy the tokenizer again"
        ) from None


def _read(path: Path) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else 'not UTF-8 text'}"
        raise ArgosyError(
            "data.bad-template", cause, key="--chat-template", value=str(path), fix="check the path"
        ) from None


def _named_template(value: Any) -> str | None:
    """Return the template of tokenizer_config.json: a text, or the one named default among several."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _content(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None

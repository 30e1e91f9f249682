"""Jinja's sandbox with bounds on memory and time, for templates that somebody else wrote.

Jinja refuses access to the interpreter, but not an expression such as `'a' * 10 ** 10`. Here the result of every operation that can
make a value much longer than its inputs is bounded before it is computed, and so is the number of calls and steps of loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

# The longest text or list.
MOST_LENGTH = 16 << 20
_MOST_BITS = 4096
# Calls, steps of `range` and steps of loops in one rendering.
_MOST_WORK = 1_000_000
# A large width in a format, or one that comes from an argument.
_WIDTH = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*?(\d{7,}|\*)")
_BRACED_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(\d{7,}|\{)")
# Methods and filters with an argument that says how long or how precise the result is.
_SIZED = {
    "center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "do_center", "do_wordwrap", "do_batch", "do_slice", "sync_do_slice",
    "do_round", "do_tojson", "tojson",
}  # fmt: skip


class TooMuchError(Exception):
    """A template asks for more memory or time than a text needs."""


class _Bounded(CodeGenerator):
    """Writes `~` as a call of `BoundedEnvironment.join`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Call `begin` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Bounded

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals.pop("lipsum", None)
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self._work = 0

    def begin(self) -> None:
        self._work = 0

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _require(_length_after(operator, left, right) <= MOST_LENGTH, operator)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        _check_arguments(__obj, (*arguments, *named.values()))
        __self._spend(len(safe_range(*arguments)) if __obj is safe_range else 1)
        # A recursive loop, called for a level below.
        if isinstance(__obj, LoopContext):
            arguments = (__self.counted(arguments[0]), *arguments[1:])
        return super().call(__context, __obj, *arguments, **named)

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [loop.iter], [], None, None)
        source.set_environment(self)
        return super()._generate(source, *arguments, **named)

    def counted(self, values: Any) -> Any:
        """Return what a loop iterates over, and count its steps."""
        if isinstance(values, Sized):
            self._spend(len(values))
            return values
        return self._each(values)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend(1)
            yield value

    def _spend(self, work: int) -> None:
        self._work += work
        _require(self._work <= _MOST_WORK, "its loops")

    def join(self, parts: Iterable[Any]) -> str:
        """Return the parts as one text (`~`)."""
        return self.concat([str(part) for part in parts])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Return pieces of output as one text (`{% set %}` and macros)."""
        pieces = list(parts)
        _require(sum(map(len, pieces)) <= MOST_LENGTH, "joining texts")
        return "".join(pieces)


def _length_after(operator: str, left: Any, right: Any) -> int:
    """Return about how long the result of an operation is, and more than MOST_LENGTH for a number of too many bits."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return 0 if left.bit_length() * abs(right) <= _MOST_BITS else MOST_LENGTH + 1
        return 0 if left.bit_length() + right.bit_length() <= _MOST_BITS else MOST_LENGTH + 1
    if operator == "%" and isinstance(left, str):
        return MOST_LENGTH + 1 if _WIDTH.search(left) else 0
    lengths = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    if operator == "*" and len(lengths) == 1:
        times = right if isinstance(right, int) else left
        return lengths[0] * times if isinstance(times, int) else 0
    return sum(lengths) if operator == "+" else 0


def _check_arguments(function: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse a method or a filter whose result would be too long."""
    name = str(getattr(function, "__name__", "a call"))
    # Jinja wraps `format` of a text in a function of its own.
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    given = [owner, *arguments] if isinstance(owner, str) else list(arguments)
    texts = [value for value in given if isinstance(value, str)]
    large = name in _SIZED and any(isinstance(value, int) and abs(value) > MOST_LENGTH for value in arguments)
    wide = name in _FORMATS and bool(texts) and _FORMATS[name].search(texts[0]) is not None
    grown = name in _GROWTH and _GROWTH[name](given, texts) > MOST_LENGTH
    _require(not (large or wide or grown), name)


def _replaced(given: list[Any], texts: list[str]) -> int:
    """Return the length at most of the first text after the second is replaced by the third."""
    if len(texts) < 3:
        return 0
    text, old, new = texts[:3]
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _joined(given: list[Any], texts: list[str]) -> int:
    """Return the length of the separators between the items."""
    items = next((value for value in given if isinstance(value, list | tuple | dict)), texts[0] if texts else "")
    return len(items) * max((len(text) for text in texts if text is not items), default=0)


def _indented(given: list[Any], texts: list[str]) -> int:
    """Return the length of the indentation of all lines."""
    widths = [value for value in given if isinstance(value, int) and not isinstance(value, bool)]
    width = max([*map(abs, widths), *map(len, texts[1:]), 4])
    return (texts[0].count("\n") + 1) * width if texts else 0


_FORMATS = {"format": _BRACED_WIDTH, "format_map": _BRACED_WIDTH, "do_format": _WIDTH}
_GROWTH = {
    "replace": _replaced, "do_replace": _replaced, "join": _joined, "do_join": _joined, "sync_do_join": _joined, "do_indent": _indented,
}  # fmt: skip


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        _check_arguments(function, (*arguments, *named.values()))
        return function(*arguments, **named)

    return bounded


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise TooMuchError(f"{what} would make a text of more than {MOST_LENGTH:,} characters, or take too long")

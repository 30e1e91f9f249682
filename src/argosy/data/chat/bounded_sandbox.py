"""Jinja's sandbox with bounds on memory and time, for templates that somebody else wrote.

Jinja refuses access to the interpreter, but not an expression such as `'a' * 10 ** 10`. Here the result of every operation that can
make a value much longer than its inputs is bounded before it is computed, and so is the number of calls, which bounds loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

# The longest text or list, and the largest integer argument of a filter or a method.
MOST_LENGTH = 16 << 20
_MOST_BITS = 4096
# Calls and steps of `range` in one rendering.
_MOST_WORK = 1_000_000
# A width in a format, which may also come from an argument (*).
_WIDTH = re.compile(r"\d{7,}|\*")


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
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self._work = 0

    def begin(self) -> None:
        self._work = 0

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _require(_length_after(operator, left, right) <= MOST_LENGTH, operator)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        _check_arguments(__obj, (*arguments, *named.values()))
        steps = len(safe_range(*arguments)) if __obj is safe_range else 1
        __self._work += steps
        _require(__self._work <= _MOST_WORK, "its loops")
        return super().call(__context, __obj, *arguments, **named)

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
    """Refuse large numbers, such as widths, wide formats, and a replacement of each character by a long text."""
    name = str(getattr(function, "__name__", "a call"))
    # Jinja wraps `format` of a text in a function of its own.
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    texts = [owner, *arguments] if isinstance(owner, str) else list(arguments)
    lengths = [len(text) for text in texts if isinstance(text, str)]
    large = any(isinstance(value, int) and abs(value) > MOST_LENGTH for value in arguments)
    wide = name in ("format", "format_map", "do_format") and any(isinstance(t, str) and _WIDTH.search(t) for t in texts)
    grown = (
        name in ("replace", "do_replace", "join", "do_join", "indent", "do_indent") and _product(lengths) > MOST_LENGTH
    )
    _require(not (large or wide or grown), name)


def _product(lengths: list[int]) -> int:
    """Return the length of the longest text times that of the next."""
    longest = sorted(lengths, reverse=True)[:2]
    return longest[0] * max(1, longest[1]) if len(longest) > 1 else 0


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        _check_arguments(function, (*arguments, *named.values()))
        return function(*arguments, **named)

    return bounded


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise TooMuchError(f"{what} would make a text of more than {MOST_LENGTH:,} characters, or take too long")

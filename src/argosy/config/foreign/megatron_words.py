"""The words of Megatron-LM's command line: arguments by name, and their values as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from argosy.errors import ArgosyError

Values = list[str]
Arguments = dict[str, Values]


def number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text and "e" not in text.lower() else value


def read_value(name: str, values: Values, read: Callable[[str], Any]) -> Any:
    try:
        return read(values[0])
    except (ValueError, IndexError):
        raise ArgosyError(
            "config.bad-value",
            f"--{name} {' '.join(values)} cannot be read",
            key=f"--{name}",
            fix="variables have to be filled in",
        ) from None


def first_word(given: Arguments, name: str, default: str = "") -> str:
    return (given.get(name) or [default])[0]

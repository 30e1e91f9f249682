"""Parsing of Megatron-LM's command-line arguments and their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from argosy.errors import ArgosyError

Values = list[str]
Arguments = dict[str, Values]


def number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text and "e" not in text.lower() else value


class _BelowOne(ValueError):
    pass


def count(text: str) -> int:
    """Parse a number of things, of which there is at least one."""
    if (value := int(text)) < 1:
        raise _BelowOne
    return value


def read_value(name: str, values: Values, read: Callable[[str], Any]) -> Any:
    try:
        value = read(values[0])
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        return value
    except _BelowOne:
        raise ArgosyError(
            "config.bad-value",
            f"--{name} {' '.join(values)} is below 1",
            key=f"--{name}",
            fix="give 1 or more, or leave it out",
        ) from None
    except (ValueError, IndexError):
        raise ArgosyError(
            "config.bad-value",
            f"--{name} {' '.join(values)} cannot be parsed",
            key=f"--{name}",
            fix="replace shell variables by their values",
        ) from None


def first_word(given: Arguments, name: str, default: str = "") -> str:
    return (given.get(name) or [default])[0]

"""Known failures, read from `failures.yaml`: what each looks like in a line of text, its cause and its fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from argosy.config.reader import read_yaml

FILE = Path(__file__).parent / "failures.yaml"
_LONGEST_LINE = 2000  # characters that are looked at


@dataclass(frozen=True)
class Failure:
    name: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    sample: str
    severity: str = "fatal"


@dataclass(frozen=True)
class Match:
    failure: Failure
    where: str
    line: str


@lru_cache
def failures() -> tuple[Failure, ...]:
    entries, _ = read_yaml(FILE)
    return tuple(Failure(**{**entry, "pattern": re.compile(entry["pattern"])}) for entry in entries)


def matches(lines: Iterable[str], where: str) -> Iterator[Match]:
    """The first line that shows each failure, in the order of the lines; of several that fit a line, the first known counts."""
    seen: set[str] = set()
    for line in lines:
        line = line[:_LONGEST_LINE].strip()
        found = next((failure for failure in failures() if failure.pattern.search(line)), None)
        if found is not None and found.name not in seen:
            seen.add(found.name)
            yield Match(found, where, line)

"""Known failures, read from `failures.yaml`: what each looks like in a line of text, its cause and its fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from argosy.config.yaml_reader import read_yaml

FILE = Path(__file__).parent / "failures.yaml"
_LONGEST_LINE = 2000  # characters that are looked at
COLOUR = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
# How programs say which rank is speaking: torch's own prefix, NCCL's and gloo's texts, and ours.
_RANK = re.compile(r"\[(?:default|rank|Rank |rank )(\d+)\]|\brank[ =](\d+)\b")

FATAL, SETBACK, CONSEQUENCE, WARNING = "fatal", "setback", "consequence", "warning"


@dataclass(frozen=True)
class Failure:
    name: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    samples: tuple[str, ...]
    severity: str = FATAL
    between_nodes: bool = False  # no news on a single machine
    exact: bool = False  # its case counts


@dataclass(frozen=True)
class Match:
    failure: Failure
    where: str
    line: str

    @property
    def cause(self) -> str:
        """In words; where they cannot be known beforehand, the line's own."""
        return self.failure.cause.replace("{line}", self.line[:200])

    @property
    def rank(self) -> int | None:
        """That the line names as speaking."""
        found = _RANK.search(self.line)
        return None if found is None else int(found[1] or found[2])


@lru_cache
def failures() -> tuple[Failure, ...]:
    entries, _ = read_yaml(FILE)
    return tuple(
        Failure(**{**entry, "pattern": _compiled(entry), "samples": tuple(entry["samples"])}) for entry in entries
    )


def _compiled(entry: dict[str, Any]) -> re.Pattern[str]:
    """For lines in small letters: to search for those is many times faster than to search for both."""
    small = re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), entry["pattern"])
    return re.compile(entry["pattern"] if entry.get("exact") else small)


def matches(lines: Iterable[str], where: str) -> Iterator[Match]:
    """The first line that shows each failure, in the order of the lines; of several that fit a line, the first known counts. A
    rank that is named is another failure of the same kind."""
    seen: set[tuple[str, int | None]] = set()
    for line in lines:
        line = COLOUR.sub("", line[:_LONGEST_LINE]).strip()
        small = line.lower()
        found = next((f for f in failures() if f.pattern.search(line if f.exact else small)), None)
        if found is None:
            continue
        match = Match(found, where, line)
        if (found.name, match.rank) not in seen:
            seen.add((found.name, match.rank))
            yield match

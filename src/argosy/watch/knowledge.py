"""Known failures, read from `failures.yaml`: the pattern of each in a line of text, its cause and its fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from argosy.config.yaml_reader import read_yaml

FILE = Path(__file__).parent / "failures.yaml"
# Characters of a line that are searched.
_LONGEST_LINE = 2000
COLOUR = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
# Prefixes that name the rank of a line: torch's, NCCL's, gloo's and ours.
_RANK = re.compile(r"\[(?:default|rank|Rank |rank )(\d+)\]|\brank[ =](\d+)\b")

FATAL, SETBACK, CONSEQUENCE, WARNING = "fatal", "setback", "consequence", "warning"


@dataclass(frozen=True)
class Failure:
    """A known failure. `between_nodes`: ignored on a single machine. `exact`: the pattern is case-sensitive."""

    name: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    samples: tuple[str, ...]
    severity: str = FATAL
    between_nodes: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Match:
    failure: Failure
    where: str
    line: str

    @property
    def cause(self) -> str:
        """The cause; `{line}` in it stands for the matched line."""
        return self.failure.cause.replace("{line}", self.line[:200])

    @property
    def rank(self) -> int | None:
        """The rank that the line names, or None."""
        found = _RANK.search(self.line)
        return None if found is None else int(found[1] or found[2])


@lru_cache
def failures() -> tuple[Failure, ...]:
    entries, _ = read_yaml(FILE)
    return tuple(
        Failure(**{**entry, "pattern": _compiled(entry), "samples": tuple(entry["samples"])}) for entry in entries
    )


def _compiled(entry: dict[str, Any]) -> re.Pattern[str]:
    """Compile a pattern for lower-case lines: searching those is many times faster than ignoring case."""
    small = re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), entry["pattern"])
    return re.compile(entry["pattern"] if entry.get("exact") else small)


def matches(lines: Iterable[str], where: str) -> Iterator[Match]:
    """Yield the first line that shows each failure, in the order of the lines.

    If several failures match a line, the first in `failures.yaml` counts. The same failure of another rank is yielded again.
    """
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

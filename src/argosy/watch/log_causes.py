"""Findings from log lines: logs of the run, and logs given to the doctor.

Each known failure gives one finding, with the ranks that show it. Messages about a lost peer weigh least: if one of eight
ranks ran out of memory and seven timed out, the verdict names the one. If the run trains all the same, no line weighs much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from argosy.record.rank_logs import last_lines, newest_attempt, of_last_start, ranks_with_logs
from argosy.untrusted import resolve_inside
from argosy.watch.finding import CONSEQUENCE, KNOWN, NOTE, SETBACK, WARNING, Finding, name_ranks
from argosy.watch.knowledge import COLOUR, Match, failures, matches
from argosy.watch.reading import printable
from argosy.watch.run_list import Run
from argosy.watch.suspects import suspects

_WEIGHTS = {"fatal": KNOWN, "setback": SETBACK, "consequence": CONSEQUENCE, "warning": WARNING}
# Most bytes read from all logs together; it takes some seconds.
READ_BYTES = 1 << 30
# Most lines searched in all logs together; a line takes 0.1 ms.
_MOST_LINES = 30_000
_MOST_LOGS, _MOST_EVIDENCE = 256, 4
_SHOWN_LINES = 200
# The logs of an attempt may begin this long before its start event, in seconds.
_BEFORE_S = 30.0
_KINDS = (".log", ".txt", ".stacks", ".err", ".out", ".json")
# The first line of a refusal.
_REFUSAL = re.compile(r"error\[([\w.-]+)\]")
# The rank in the name of a log.
_OF_RANK = re.compile(r"(?:^|rank[-_.]?)(\d+)\.")


def from_logs(run: Run, given: Sequence[Path], *, state: str, read_bytes: int = READ_BYTES) -> Iterator[Finding]:
    """Yield the findings of all logs.

    Args:
        state: state of the run. A run that trains or was asked to stop is well, whatever its logs say about others.
    """
    own = {path: str(path.relative_to(run.root)) for path in _own_logs(run)}
    logs = {path: path.name for path in given} | own
    found: dict[str, list[tuple[Match, int | None]]] = {}
    reported = frozenset(str(event["code"]) for event in run.events() if "code" in event)
    each = read_bytes // max(1, len(logs)), max(300, min(_MOST_LINES, read_bytes >> 12) // max(1, len(logs)))
    for path, where in logs.items():
        for match in (
            _cached_matches(path, where, _age(path), reported, *each) if path in own else _read(path, where, *each)
        ):
            found.setdefault(match.failure.name, []).append(
                (match, match.rank if match.rank is not None else _rank_of(path))
            )
    hosts = {beat.get("host") for beat in run.heartbeats().values()}
    for failure in failures():
        shown = found.get(failure.name)
        if shown and not (failure.between_nodes and len(hosts) == 1):
            yield from _finding(shown, run, state)


def _read(path: Path, where: str, most_bytes: int, most_lines: int) -> Iterable[Match]:
    return matches(suspects(path, most_bytes, most_lines), where)


@lru_cache(maxsize=2 * _MOST_LOGS)
def _cached_matches(path: Path, where: str, age: object, reported: frozenset[str], *most: int) -> tuple[Match, ...]:
    """Return the matches in one of the run's own logs. Cached by the file's size and time."""
    return tuple(matches(_without_refusals(of_last_start(suspects(path, *most)), reported), where))


def _without_refusals(lines: Iterable[str], reported: frozenset[str]) -> Iterator[str]:
    """Drop refusals of Argosy itself that the run's events report."""
    refused = False
    for line in lines:
        found = _REFUSAL.match(line)
        refused = (found is not None and found[1] in reported) or (refused and line.startswith("  "))
        if not refused:
            yield line


def _age(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _finding(shown: list[tuple[Match, int | None]], run: Run, state: str) -> Iterator[Finding]:
    failure, weight = shown[0][0].failure, _WEIGHTS[shown[0][0].failure.severity]
    ranks = sorted({rank for _, rank in shown if rank is not None})
    verdict = f"{name_ranks(ranks)}: {shown[0][0].cause}" if ranks else shown[0][0].cause
    verdict += against_plan(run) if failure.name == "cuda-oom" else ""
    verdict += f" ({shown[0][0].where})"
    # Training since the last start shows that the retry has helped.
    if failure.severity == "setback" and run.has_trained:
        weight = NOTE
    if state in ("running", "stopped") and failure.severity in ("setback", "consequence"):
        return
    if state == "running" and failure.severity == "fatal":
        weight, verdict = WARNING, f"{verdict}; the run goes on"
    evidence = [f"{match.where}: {match.line[:300]}" for match, _ in shown[:_MOST_EVIDENCE]]
    evidence += [f"and in {len(shown) - _MOST_EVIDENCE} more places"] if len(shown) > _MOST_EVIDENCE else []
    yield Finding(weight, verdict, failure.fix, evidence, failure.name)


def end_of_log(run: Run, rank: int) -> dict[str, Any]:
    """Return the last lines of a rank's log in the newest attempt as plain text, and the ranks that have a log."""
    attempt = newest_attempt(run.root)
    if attempt is None:
        return {"ranks": [], "lines": []}
    path = attempt / f"{rank}.log"
    lines = [printable(COLOUR.sub("", line)) for line in last_lines(path, run.root)[-_SHOWN_LINES:]]
    return {"ranks": ranks_with_logs(attempt), "path": str(path.relative_to(run.root)), "lines": lines}


def against_plan(run: Run) -> str:
    """Return the predicted memory, for a rank that ran out of it."""
    stages = run.plan().get("memory_gib")
    step = f" at step {int(run.series.last.get('step', 0)) + 1}"
    predicted = (
        [float(stage.get("device") or 0.0) for stage in stages if isinstance(stage, dict)]
        if isinstance(stages, list)
        else []
    )
    return f"{step}: plan said {max(predicted):.0f} GiB, see `argosy plan --explain`" if predicted else step


def _own_logs(run: Run) -> list[Path]:
    """Return the logs of the newest attempt's ranks, and other logs that changed since it began."""
    newest, begun = newest_attempt(run.root), run.begun - _BEFORE_S
    found: list[tuple[float, Path]] = []
    for folder in ("logs", "debug"):
        for path in (run.root / folder).rglob("*"):
            of_ranks = path.parent.name.isdecimal() and path.parent.parent == run.root / "logs"
            try:
                # A link out of the run directory would show a file of this user to others who read the page or report.
                if path.suffix in _KINDS and resolve_inside(path, run.root / folder).is_file():
                    changed = path.stat().st_mtime
                    if path.parent == newest if of_ranks else changed >= begun:
                        found.append((changed, path))
            except OSError:
                # The file was deleted meanwhile.
                continue
    logs = [path for _, path in sorted(found, reverse=True)]
    # The rank that went silent first may be the cause, and the one that wrote last may name it.
    half = _MOST_LOGS // 2
    return logs if len(logs) <= _MOST_LOGS else [*logs[:half], *logs[-half:]]


def _rank_of(path: Path) -> int | None:
    """Return the rank from a log's name: `3.log`, `rank-3.stacks`."""
    found = _OF_RANK.search(path.name)
    return None if found is None else int(found[1])

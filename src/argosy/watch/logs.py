"""What is known about lines in logs: those of the run, and those that the doctor is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from argosy.watch.finding import KNOWN, WARNING, Finding
from argosy.watch.knowledge import Match, matches
from argosy.watch.runs import Run

_LOG_BYTES = 2 << 20  # at the end of each log that are read
_BEFORE_S = 30.0  # the start of an attempt, in which its logs may have begun


def from_logs(run: Run, logs: Sequence[Path]) -> Iterator[Finding]:
    files = [*logs, *_own_logs(run)]
    for path in files:
        lines = _tail(path)
        for match in matches(lines, path.name if path in logs else str(path.relative_to(run.root))):
            yield _of(match, run)


def _of(match: Match, run: Run) -> Finding:
    failure = match.failure
    verdict = f"{failure.cause} ({match.where})"
    if failure.name == "cuda-oom":
        verdict += _against_plan(run)
    weight = KNOWN if failure.severity == "fatal" else WARNING
    return Finding(weight, verdict, failure.fix, [f"{match.where}: {match.line[:300]}"], failure.name)


def _against_plan(run: Run) -> str:
    stages = run.plan().get("memory_gib")
    if not isinstance(stages, list) or not stages:
        return ""
    said = max(float(stage.get("device", 0.0)) for stage in stages if isinstance(stage, dict))
    return f" at step {int(run.series.last.get('step', 0)) + 1}: plan said {said:.0f} GiB, see `argosy plan --explain`"


def _own_logs(run: Run) -> list[Path]:
    """Of the newest attempt."""
    starts = [event.get("time", 0.0) for event in run.events() if event["event"] in ("start", "resume")]
    begun = starts[-1] - _BEFORE_S if starts else 0.0
    folders = [path for folder in ("logs", "debug") for path in (run.root / folder).rglob("*")]
    found = [path for path in folders if path.is_file() and path.stat().st_mtime >= begun]
    return sorted(
        (p for p in found if p.suffix in (".log", ".txt", ".stacks", ".err", ".out", ".json")),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )[:256]


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []

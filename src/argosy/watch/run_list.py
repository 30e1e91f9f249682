"""Run directories under a root: finding them, and what is known of each at a glance.

A run is only ever looked up among those that were found by looking, so that no name, however written, leads anywhere else.
"""

from __future__ import annotations

import difflib
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.config.secrets import without_secrets
from argosy.errors import ArgosyError
from argosy.record.alerts import TROUBLE
from argosy.record.heartbeat import read_heartbeats
from argosy.record.jsonl import Record
from argosy.record.rundir import RunDir
from argosy.record.tail import RecentRecords
from argosy.untrusted import read_object
from argosy.watch.hearing import Hearing, listen
from argosy.watch.heat import HeatMap
from argosy.watch.reading import printable, readable, sound, table
from argosy.watch.series import Series

_DEPTH = 3  # folders below the root
_MOST_RUNS = 2000
_MOST_EVENTS = 5000
QUIET_AFTER_S = 120.0  # a run of which nothing was heard for so long is not running


def find_runs(root: Path) -> dict[str, Path]:
    """By name: the path below the root, or the root's own name where it is a run itself."""
    found: dict[str, Path] = {}

    def look(folder: Path, depth: int) -> None:
        if len(found) >= _MOST_RUNS:
            return
        if (folder / "metrics.jsonl").is_file() or (folder / "resolved.json").is_file():
            found[readable(folder.name if folder == root else folder.relative_to(root).as_posix())] = folder
        elif depth:
            try:
                inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
            except OSError:
                return
            for name in inside:
                if not name.startswith("."):
                    look(folder / name, depth - 1)

    look(root, _DEPTH)
    return found


def require_run(path: Path) -> RunDir:
    run = RunDir(path)
    if not (run.metrics.exists() or run.resolved_file.exists() or run.events.exists()):
        raise ArgosyError(
            "run.not-found",
            f"{path} is not a run directory: it has no metrics.jsonl, events.jsonl or resolved.json",
            fix=f"name a directory that `argosy train` made, as {_example(path)}",
        )
    return run


def _example(path: Path) -> str:
    """A run that is there, near the name that was given, or beside it."""
    for root in (path, path.parent):
        if root.is_dir() and (found := find_runs(root)):
            near = difflib.get_close_matches(path.name, found, n=3, cutoff=0.5) or sorted(found)[:3]
            return ", ".join(printable(str(root / name)) for name in near)
    return "runs/demo"


@dataclass
class Run:
    """One run, with its figures kept in memory."""

    name: str
    root: Path
    series: Series = field(init=False)

    def __post_init__(self) -> None:
        self.name = readable(self.name)
        self.dir, self.series = RunDir(self.root), Series(self.root / "metrics.jsonl")
        self._events = RecentRecords(self.dir.events, _MOST_EVENTS, _event)
        self.heat, self._hearing = HeatMap(self.dir.ranks), Hearing()

    def state(self) -> str:
        """done, running, stopped (asked to) or dead (without a word)."""
        last = next((event for event in reversed(self.events()) if event.get("event") in _ENDS), None)
        if is_held(self.root):
            return "running"
        kind = None if last is None else str(last["event"])
        if kind in ("start", "resume", "restart", None):
            ages = (float(beat["age_s"]) for beat in self.heartbeats().values() if beat.get("alive"))
            if min(ages, default=QUIET_AFTER_S) < QUIET_AFTER_S:
                return "running"
            return "dead" if kind or self._has_logged() else "new"
        return {"done": "done", "interrupted": "stopped"}.get(kind, "dead")

    def events(self) -> list[Record]:
        """The newest."""
        return self._events.read()

    @property
    def begun(self) -> float:
        """When it was started or resumed last; 0 where nothing says so."""
        return next((e.get("time", 0.0) for e in reversed(self.events()) if e["event"] in ("start", "resume")), 0.0)

    @property
    def has_trained(self) -> bool:
        """Since then."""
        return bool(self.series.last) and float(self.series.last.get("time") or 0.0) >= self.begun

    def heartbeats(self) -> dict[int, Record]:
        """With `age_s`, how long ago each was heard of."""
        return self._hearing.note({rank: sound(beat) for rank, beat in read_heartbeats(self.dir.heartbeats).items()})

    def listen(self) -> None:
        """Before a run is judged by one look: whether it lives is not left to clocks, which may differ."""
        if not is_held(self.root):
            listen(self.heartbeats)

    def spec(self) -> dict[str, Any]:
        return table(without_secrets(self._json("resolved.json").get("spec")))

    def origins(self) -> dict[str, str]:
        return table(self._json("resolved.json").get("origins"))

    def plan(self) -> dict[str, Any]:
        """What was predicted, where a plan is stored with the run."""
        plan = self._json("plan.json")
        if isinstance(plan.get("plans"), list) and plan["plans"]:
            return table(plan.get("asked") or plan["plans"][0])
        return plan

    def checkpoints(self) -> list[dict[str, Any]]:
        """The newest first; those that are deleted just now are left out."""
        paths = sorted((self.root / "checkpoints").glob("step-*"), reverse=True)
        return [facts for path in paths if (facts := _about(path)) is not None]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return read_object(self.root / name, within=self.root)
        except (OSError, ValueError):
            return {}

    def summary(self) -> dict[str, Any]:
        """For a list of runs."""
        last = self.series.last
        keys = ("step", "steps", "loss", "tokens", "tokens_per_s", "mfu", "peak", "goodput", "cost", "eta_s", "time", "memory_gib", "step_s", "grad_norm", "lr", "tflops", "tokens_per_s_gpu", "spent", "data_wait", "rank_spread", "slowest_rank")  # fmt: skip
        return {
            "name": self.name,
            "state": self.state(),
            "version": self.series.version,
            "records": self.series.count,
            "reading": self._reading(),
            "last": {key: last[key] for key in keys if key in last},
            "alerts": sum(event.get("event") in TROUBLE for event in self.events()),
            "skips": self.skips(),
        }

    def skips(self) -> int:
        """Steps the guard skipped, those that were taken again after a rewind included."""
        return sum(event.get("event") == "skip" for event in self.events())

    def _has_logged(self) -> bool:
        try:
            return self.dir.metrics.is_file() and self.dir.metrics.stat().st_size > 0
        except OSError:
            return False

    def _reading(self) -> float | None:
        """How much of the file has been read, while it has not been all."""
        try:
            size = self.dir.metrics.stat().st_size
        except OSError:
            return None
        return None if self.series.size_read >= size * 0.999 or not size else self.series.size_read / size


_ENDS = frozenset(("start", "resume", "restart", "done", "interrupted", "non-finite", "failed", "gave-up", "rank-died"))


def _event(record: Record) -> Record | None:
    return sound(record) if isinstance(record.get("event"), str) else None


def _about(checkpoint: Path) -> dict[str, Any] | None:
    manifest = checkpoint / "manifest.json"
    try:
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        whole = manifest.is_file()
        written = (manifest if whole else checkpoint).stat().st_mtime
    except OSError:
        return None
    return {"name": readable(checkpoint.name), "bytes": size, "complete": whole, "time": written}


def is_held(root: Path) -> bool:
    """Whether a trainer on this machine holds the run's lock."""
    try:
        fd = os.open(root / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False

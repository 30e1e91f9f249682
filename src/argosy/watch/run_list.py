"""The run directories under a root, and the state of each.

A run is looked up only among the directories found under the root, so no name can lead anywhere else.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.config.resolve import flatten
from argosy.config.secrets import without_secrets
from argosy.errors import ArgosyError
from argosy.record.alerts import TROUBLE
from argosy.record.heartbeat import HeartbeatFiles
from argosy.record.jsonl import Record
from argosy.record.lifecycle import STARTS, ended_as, last_turn
from argosy.record.run_notes import read_notes
from argosy.record.rundir import RunDir
from argosy.record.tail import RecentRecords
from argosy.untrusted import read_object
from argosy.watch.hearing import HeartbeatAges, wait_for_heartbeat
from argosy.watch.heat import HeatMap
from argosy.watch.reading import is_number, printable, readable, table, valid_fields
from argosy.watch.series import Series

# Levels of folders below the root.
_DEPTH = 3
_MOST_RUNS = 2000
_MOST_EVENTS, _MOST_SAMPLES = 5000, 2000
# Characters of a prompt or a text that are shown.
_LONGEST_TEXT = 20_000
# A run without a heartbeat for this long is not running.
QUIET_AFTER_S = 120.0
# Seconds between two looks at the heartbeats, of which thousands of ranks have thousands of files.
_LISTEN_S = 0.2


def find_runs(root: Path) -> dict[str, Path]:
    """Return run directories by name: the path below the root, or the root's own name if it is a run itself."""
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
    """Return existing runs with a similar name, as examples for the error message."""
    for root in (path, path.parent):
        if root.is_dir() and (found := find_runs(root)):
            near = difflib.get_close_matches(path.name, found, n=3, cutoff=0.5) or sorted(found)[:3]
            return ", ".join(printable(str(root / name)) for name in near)
    return "runs/demo"


@dataclass(frozen=True)
class StoredSpec:
    """What resolved.json says, without secrets. `version` tells whether the file has changed."""

    spec: dict[str, Any]
    flat: dict[str, Any]
    origins: dict[str, str]
    parameters: int | None
    version: tuple[int, ...] | None

    @classmethod
    def of(cls, document: dict[str, Any], version: tuple[int, ...] | None) -> StoredSpec:
        try:
            spec = table(without_secrets(document.get("spec")))
            flat = dict(flatten(spec)) if spec else {}
        except RecursionError:
            # A stranger's file, nested deeper than any spec. It must not break the list of all runs.
            spec, flat = {}, {}
        return cls(spec, flat, table(document.get("origins")), _parameters(spec), version)


@dataclass
class Run:
    """One run, with its metrics in memory."""

    name: str
    root: Path
    series: Series = field(init=False)

    def __post_init__(self) -> None:
        self.name = readable(self.name)
        self.dir, self.series = RunDir(self.root), Series(self.root / "metrics.jsonl")
        self._events = RecentRecords(self.dir.events, _MOST_EVENTS, _event)
        self._samples = RecentRecords(self.root / "samples.jsonl", _MOST_SAMPLES, _sample)
        self.heat, self._heartbeat_ages = HeatMap(self.dir.ranks), HeartbeatAges()
        self._heartbeat_files, self._heard = HeartbeatFiles(self.dir.heartbeats), float("-inf")
        self._beats: dict[int, Record] = {}
        self._checkpoints: dict[Path, dict[str, Any]] = {}
        self._spec: StoredSpec | None = None

    def state(self) -> str:
        """Return the state: new, running, done, stopped (on request) or dead (without an end event)."""
        events = self.events()
        if is_held(self.root):
            return "running"
        kind = last_turn(events)
        if kind is None or kind in STARTS:
            ages = (float(beat["age_s"]) for beat in self.heartbeats().values() if beat.get("alive"))
            if min(ages, default=QUIET_AFTER_S) < QUIET_AFTER_S:
                return "running"
            return "dead" if kind or self._has_logged() else "new"
        return ended_as(events) or "dead"

    def events(self) -> list[Record]:
        """Return the newest events."""
        return self._events.read()

    @property
    def begun(self) -> float:
        """Wall-clock time of the last start or resume; 0 if unknown."""
        return next((e.get("time", 0.0) for e in reversed(self.events()) if e["event"] in ("start", "resume")), 0.0)

    @property
    def has_trained(self) -> bool:
        """True if a step was logged since the last start or resume."""
        return bool(self.series.last) and float(self.series.last.get("time") or 0.0) >= self.begun

    def heartbeats(self) -> dict[int, Record]:
        """Return the heartbeats, each with its age `age_s` in seconds."""
        if time.monotonic() - self._heard >= _LISTEN_S:
            beats = {rank: valid_fields(beat) for rank, beat in self._heartbeat_files.read().items()}
            self._beats, self._heard = self._heartbeat_ages.with_ages(beats), time.monotonic()
        return self._beats

    def listen(self) -> None:
        """Wait for a heartbeat before the run is judged by a single look, since clocks of machines differ."""
        if not is_held(self.root):
            wait_for_heartbeat(self.heartbeats)

    def spec(self) -> dict[str, Any]:
        return self._stored().spec

    def flat_spec(self) -> dict[str, Any]:
        """Return the spec by dotted key; an empty one for a run without a spec."""
        return self._stored().flat

    def origins(self) -> dict[str, str]:
        return self._stored().origins

    def parameters(self) -> int | None:
        """Return the number of the model's parameters, or None if this version cannot count them."""
        return self._stored().parameters

    def _stored(self) -> StoredSpec:
        """Return resolved.json, which is parsed again when it has changed."""
        version: tuple[int, ...] | None = None
        with contextlib.suppress(OSError):
            status = self.dir.resolved_file.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self._spec is None or self._spec.version != version:
            self._spec = StoredSpec.of(self._json("resolved.json"), version)
        return self._spec

    def created(self) -> float | None:
        """Return the wall-clock time when the run was first started; before its first log, when its spec was stored."""
        if self.series.began is not None:
            return self.series.began
        try:
            return self.dir.resolved_file.stat().st_mtime
        except OSError:
            return None

    def seconds(self) -> float | None:
        """Return the seconds from the first start to the newest log."""
        last = self.series.last
        if last.get("spent"):
            return float(sum(last["spent"].values()))
        began, logged = self.series.began, last.get("time")
        return None if began is None or logged is None else float(logged) - began

    def samples(self) -> list[Record]:
        """Return the newest samples of text that the run has logged."""
        return self._samples.read()

    def plan(self) -> dict[str, Any]:
        """Return the planner's prediction, if one is stored with the run."""
        plan = self._json("plan.json")
        if isinstance(plan.get("plans"), list) and plan["plans"]:
            return table(plan.get("asked") or plan["plans"][0])
        return plan

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints, newest first. One that is being deleted is skipped."""
        paths = sorted((self.root / "checkpoints").glob("step-*"), reverse=True)
        known, self._checkpoints = self._checkpoints, {}
        for path in paths:
            facts = known.get(path)
            facts = facts if facts is not None and _is_unchanged(path, facts) else _about(path)
            if facts is not None:
                self._checkpoints[path] = facts
        return list(self._checkpoints.values())

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return read_object(self.root / name, within=self.root)
        except (OSError, ValueError):
            return {}

    def summary(self) -> dict[str, Any]:
        """Return the fields for a list of runs."""
        last = self.series.last
        keys = ("step", "steps", "loss", "tokens", "tokens_per_s", "mfu", "peak", "goodput", "cost", "eta_s", "time", "memory_gib", "step_s", "grad_norm", "lr", "tflops", "tokens_per_s_gpu", "spent", "data_wait", "rank_spread", "slowest_rank")  # fmt: skip
        return {
            "name": self.name,
            "state": self.state(),
            "version": self.series.version,
            "records": self.series.count,
            "reading": self._reading(),
            "last": {key: last[key] for key in keys if key in last},
            "validation": next((value for _, value in self.series.latest("validation_loss", 1)), None),
            "best_validation": self.series.lowest("validation_loss"),
            "parameters": self.parameters(),
            "created": self.created(),
            "seconds": self.seconds(),
            **read_notes(self.root).as_dict(),
            "alerts": sum(event.get("event") in TROUBLE for event in self.events()),
            "skips": self.skips(),
        }

    def skips(self) -> int:
        """Return how many steps the guard skipped, including steps repeated after a rewind."""
        return sum(event.get("event") == "skip" for event in self.events())

    def _has_logged(self) -> bool:
        try:
            return self.dir.metrics.is_file() and self.dir.metrics.stat().st_size > 0
        except OSError:
            return False

    def _reading(self) -> float | None:
        """Return the share of the metrics file that has been read, or None if all of it has."""
        try:
            size = self.dir.metrics.stat().st_size
        except OSError:
            return None
        return None if self.series.size_read >= size * 0.999 or not size else self.series.size_read / size


def _event(record: Record) -> Record | None:
    return valid_fields(record) if isinstance(record.get("event"), str) else None


def _sample(record: Record) -> Record | None:
    """Return a sample with the fields that are of the right type, or None if its text or step is missing."""
    if not is_number(record.get("step")) or not isinstance(record.get("text"), str):
        return None
    numbers = {key: value for key in ("step", "tokens", "time") if is_number(value := record.get(key))}
    texts = {key: value[:_LONGEST_TEXT] for key in ("prompt", "text") if isinstance(value := record.get(key), str)}
    return numbers | texts


def _parameters(spec: dict[str, Any]) -> int | None:
    try:
        return count_parameters(ModelSpec.model_validate(spec.get("model"))).total
    except (ValueError, ArithmeticError, ArgosyError):
        # The spec is of another version, or damaged.
        return None


def _is_unchanged(checkpoint: Path, facts: dict[str, Any]) -> bool:
    try:
        return bool(facts["complete"] and (checkpoint / "manifest.json").stat().st_mtime == facts["time"])
    except OSError:
        return False


def _about(checkpoint: Path) -> dict[str, Any] | None:
    manifest = checkpoint / "manifest.json"
    try:
        whole = manifest.is_file()
        size = _stated_size(manifest) if whole else 0
        if size is None or not whole:
            size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        written = (manifest if whole else checkpoint).stat().st_mtime
    except OSError:
        return None
    return {"name": readable(checkpoint.name), "bytes": size, "complete": whole, "time": written}


def _stated_size(manifest: Path) -> int | None:
    """Return the bytes of a checkpoint's files by its manifest, with its own: thousands of ranks have thousands of files. None if the
    manifest does not say."""
    try:
        files = read_object(manifest, within=manifest.parent)["files"].values()
        return manifest.stat().st_size + sum(int(file["bytes"]) for file in files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def is_held(root: Path) -> bool:
    """Return whether a trainer on this machine holds the run's lock."""
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

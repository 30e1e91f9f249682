"""The run directory, `runs/<name>/`: what was asked, what it became, what happened, and the checkpoints.

Everything that watches a run reads this directory and nothing else, so it works over a shared file system and after
the job is dead. A lock that the kernel releases on any death keeps two trainers out of one directory.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import orjson

from argosy.config.resolve import Resolved, flatten
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.record.files import replace_file

# Keys that may differ when a run is continued: they change neither the model, nor the data, nor the numbers of a step
# already taken. Everything else is held to what the run was started with.
FREE_TO_CHANGE = ("runs_dir", "log.", "checkpoint.", "eval", "parallel.", "train.device")
CHANGES_LATER_STEPS = ("train.steps", "train.tokens", "train.samples", "train.epochs", "optim.")


class RunDir:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    @property
    def spec_file(self) -> Path:
        return self.root / "run.yaml"

    @property
    def resolved_file(self) -> Path:
        return self.root / "resolved.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer kept with the run, if there is one."""
        return next(iter(sorted(self.root.glob("tokenizer.*"))), None)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def holds_a_run(self) -> bool:
        return self.resolved_file.exists() or self.checkpoints.exists()

    def open_for_training(self) -> None:
        """Make the directory and take its lock; refuse if it cannot be written, or if another process holds it."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._lock, 0)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgosyError(
                "run.busy",
                f"another process is training in {self.root}",
                key="name",
                value=self.root.name,
                fix="wait for it or stop it, or give this run another name",
            ) from None
        except OSError as error:
            raise ArgosyError(
                "run.unwritable",
                f"{self.root} cannot be written: {error.strerror or error}",
                key="runs_dir",
                value=str(self.root.parent),
                fix="make the directory writable, or choose another with runs_dir=PATH",
            ) from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def archive(self) -> Path:
        """Move an earlier run of the same name out of the way, never deleting it."""
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.old-{number}")).exists():
            number += 1
        self.root.rename(target)
        return target

    def store_spec(self, resolved: Resolved, source: Path | None) -> list[str]:
        """Keep what was asked and what it became; for a run that goes on, return the allowed changes in words."""
        changes = self.compare(resolved) if self.resolved_file.exists() else []
        if source is not None:
            replace_file(self.spec_file, source.read_bytes())
        document = {"spec": resolved.spec.model_dump(mode="json"), "origins": resolved.origins}
        replace_file(self.resolved_file, orjson.dumps(document, option=orjson.OPT_INDENT_2))
        return changes

    def load_spec(self) -> RunSpec:
        return RunSpec.model_validate(self._stored())

    def _stored(self) -> dict[str, Any]:
        try:
            return dict(orjson.loads(self.resolved_file.read_bytes())["spec"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArgosyError(
                "run.not-found",
                f"{self.root} is not a run directory: resolved.json cannot be read ({error})",
                fix="give the directory of a run, as runs/<name>",
            ) from None

    def compare(self, resolved: Resolved) -> list[str]:
        """The allowed changes since the run was started, in words; a refusal where one is not allowed."""
        before = dict(flatten(self._stored()))
        after = dict(flatten(resolved.spec.model_dump(mode="json")))
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        free = FREE_TO_CHANGE + CHANGES_LATER_STEPS
        refused = sorted(key for key in changed if not key.startswith(free))
        if refused:
            key = refused[0]
            differences = "\n".join(f"{k}: was {before.get(k)!r}, now {after.get(k)!r}" for k in refused)
            raise ArgosyError(
                "run.changed",
                f"{self.root} was started with other values, and going on would mix two runs:\n{differences}",
                key=key,
                value=after.get(key),
                origin=resolved.origins.get(key),
                fix="restore the values, or start another run with name=…",
            )
        return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in sorted(changed)]


def find_run(path: Path) -> RunDir:
    """A run directory given by the user, or a refusal that says what is there instead."""
    run = RunDir(path)
    if not run.resolved_file.exists():
        known = sorted(p.parent.name for p in path.parent.glob("*/resolved.json")) if path.parent.is_dir() else []
        raise ArgosyError(
            "run.not-found",
            f"there is no run in {path}",
            fix=f"runs in {path.parent}: {', '.join(known)}"
            if known
            else "give the directory of a run, as runs/<name>",
        )
    return run

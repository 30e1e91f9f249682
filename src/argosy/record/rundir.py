"""The run directory, `runs/<name>/`: what was asked, what it became, what happened, and the checkpoints.

Everything that watches a run reads this directory and nothing else, so it works over a shared file system and after
the job is dead. A lock that the kernel releases on any death keeps two trainers out of one directory.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import ValidationError

from argosy.config.resolve import LENGTH_KEYS, Resolved, flatten
from argosy.config.schema import RunSpec
from argosy.config.secrets import source_without_secrets, without_secrets
from argosy.echo import VALUE_LIMIT, shorten
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.record.versions import earlier_versions, version_at
from argosy.untrusted import read_object

# Keys that may differ when a run is continued. Everything else is held to what the run was started with.
FREE_TO_CHANGE = ("runs_dir", "log.", "checkpoint.", "eval", "data.order_cache", "fault.", "cluster")
# These change the numbers of the steps to come (the layout and what computes it through rounding and dropout), and are recorded as
# changes.
CHANGES_LATER_STEPS = (
    "train.steps", "train.tokens", "train.samples", "train.epochs", "train.precision", "train.z_loss", "train.device",
    "train.deterministic", "optim.", "parallel.", "guard", "machine.",
)  # fmt: skip
HELD = ("optim.name",)  # among them: one optimiser cannot go on from another's state


Facts = dict[str, Any]


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
    def plan_file(self) -> Path:
        """What was predicted."""
        return self.root / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def ranks(self) -> Path:
        return self.root / "ranks.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeat"

    @property
    def debug(self) -> Path:
        """What was saved of ranks that stalled or died."""
        return self.root / "debug"

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
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ArgosyError(
                "run.busy",
                f"another process is training in {self.root}",
                key="name",
                value=self.root.name,
                fix="wait for it or stop it, or give this run another name",
            ) from None
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from None

    def _unwritable(self, reason: str) -> ArgosyError:
        return ArgosyError(
            "run.unwritable",
            f"{self.root} cannot be written: {reason}",
            key="runs_dir",
            value=str(self.root.parent),
            fix="make the directory writable, free some space, or choose another with runs_dir=PATH",
        )

    def require_writable(self) -> None:
        """For a dry run: whether the directory could be made and written, without doing so."""
        nearest = next(parent for parent in (self.root, *self.root.absolute().parents) if parent.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise self._unwritable(f"{nearest} is {'not writable' if nearest.is_dir() else 'not a directory'}")

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def lost(self) -> Literal["deleted", "moved"] | None:
        """What became of the directory whose lock we hold: None where it is in its place. Costs two calls of the system."""
        if self._lock is None:
            return None
        try:
            there: os.stat_result | None = os.stat(self.root / ".lock")
        except OSError:
            there = None
        try:
            ours = os.fstat(self._lock)
        except OSError:  # a network file system forgets files that another machine deleted
            return "deleted" if there is None else "moved"
        if there is not None and os.path.samestat(ours, there):
            return None if self.checkpoints.is_dir() else "deleted"
        return "deleted" if there is None and ours.st_nlink == 0 else "moved"

    def recreate(self) -> None:
        """Make a directory that was deleted once more, and take its lock."""
        self.close()
        self.open_for_training()
        self.heartbeats.mkdir(exist_ok=True)

    def require_ours(self) -> None:
        """Refuse to write into a directory that has taken the place of the one whose lock we hold."""
        if self.lost() == "moved":
            raise ArgosyError(
                "run.busy",
                f"{self.root} was moved or replaced while this run was training",
                fix="move it back, and run it again",
            )

    def archive(self) -> Path:
        """Move an earlier run of the same name out of the way, never deleting it. Its lock must be held: a run that is
        being trained cannot be moved."""
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.old-{number}")).exists():
            number += 1
        self.root.rename(target)
        self.close()
        return target

    def store(
        self,
        resolved: Resolved,
        source: str | None,
        data: Facts,
        machine: Facts,
        start: Facts | None = None,
        *,
        step: int = 0,
        oldest: int = 0,
        identity: str | None = None,
    ) -> None:
        """Keep what was asked (`source`, the text of the run spec), what it became, which data it was, what computes it, and what it started from (once: it never
        changes). It holds from the step after `step` on; what made the steps before, from that of the `oldest` checkpoint, is kept.
        `identity` is that of the run, where its checkpoints know it and the record is new."""
        stored = self._stored() if self.resolved_file.exists() else None
        document: Facts = {
            "id": (stored or {}).get("id") or identity or uuid.uuid4().hex,
            "spec": without_secrets(resolved.spec.model_dump(mode="json")),
            "origins": resolved.origins,
            "data": data,
            "machine": machine,
            "start": start if start is not None or stored is None else stored["start"],
        }
        document["earlier"] = [] if stored is None else earlier_versions(stored, document, step, oldest)
        try:
            self._replace(document)
            if source is not None:
                replace_file(self.spec_file, source_without_secrets(source).encode())
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from None

    def _replace(self, document: Facts) -> None:
        replace_file(self.resolved_file, orjson.dumps(document, option=orjson.OPT_INDENT_2), sync=True)

    def require_room(self) -> None:
        """Refuse a directory in which the record cannot be replaced, by replacing it with itself."""
        try:
            replace_file(self.resolved_file, self.resolved_file.read_bytes(), sync=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from None

    @property
    def identity(self) -> str | None:
        """Of the run, as its checkpoints carry it; None where it was begun before there was one, or cannot be read."""
        try:
            found = self._stored()["id"]
            return found if isinstance(found, str) else None
        except ArgosyError:
            return None

    def spec_at(self, step: int) -> RunSpec | None:
        """The spec that made `step`, or None where it cannot be read by this version of Argosy."""
        if not self.resolved_file.exists():
            return None
        try:
            return RunSpec.model_validate(version_at(self._stored(), step)["spec"])
        except ValidationError:
            return None

    def load_spec(self) -> RunSpec:
        try:
            return RunSpec.model_validate(self._stored()["spec"])
        except ValidationError as error:
            raise self._damaged(error.errors()[0]["msg"]) from None

    def data_facts(self) -> Facts:
        """Of the data the run was started with, as `argosy.data.open` describes it."""
        return dict(self._stored().get("data", {}))

    def _stored(self) -> Facts:
        try:
            document = read_object(self.resolved_file, within=self.root)
            # An older Argosy stored secrets too: they go no further.
            found = {"spec": without_secrets(dict(document["spec"])), "data": dict(document["data"])}
            earlier = [dict(e) | {"spec": without_secrets(dict(e["spec"]))} for e in document.get("earlier", [])]
            return found | {name: document.get(name) for name in ("machine", "start", "id")} | {"earlier": earlier}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, reason: str) -> ArgosyError:
        return ArgosyError(
            "run.damaged",
            f"{self.resolved_file} cannot be read: {reason}",
            fix="restore it; or delete it, and the next `argosy train` writes it anew and goes on from the checkpoints",
        )

    def compare(self, resolved: Resolved, data: Facts, machine: Facts | None, *, step: int | None = None) -> list[str]:
        """The allowed changes since `step` was made, in words; a refusal where one is not allowed. No `step`: since the last one.
        No `machine`: the run will go on on another, of which nothing is known."""
        if not self.resolved_file.exists():
            return []
        stored = self._stored()
        made = version_at(stored, step)
        # A fact of the machine that an older Argosy did not record counts as unchanged.
        known = {**machine, **(made["machine"] or {})} if machine else {}
        before = _flat(_with_new_keys(without_secrets(made["spec"])), stored["data"], known)
        after = _flat(without_secrets(resolved.spec.model_dump(mode="json")), data, machine or {})
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        free: tuple[str, ...] = FREE_TO_CHANGE + CHANGES_LATER_STEPS
        if after.get("data.order") == "megatron":  # there the length decides the order of all samples
            free = tuple(key for key in free if key not in LENGTH_KEYS)
        refused = sorted(key for key in changed if (key in HELD or not key.startswith(free)) and not _only_moved(key))
        if refused:
            key = refused[0]
            differences = "\n".join(
                f"{k}: was {_shown(repr(before.get(k)))}, now {_shown(repr(after.get(k)))}" for k in refused
            )
            raise ArgosyError(
                "run.changed",
                f"{self.root} was started with other values, and going on would mix two runs:\n{differences}",
                key=key,
                value=after.get(key),
                origin=resolved.origins.get(key),
                fix="restore the values, or start another run: name=…, or --fresh --archive to move this one aside",
            )
        return [f"{key}: {_shown(before.get(key))} -> {_shown(after.get(key))}" for key in sorted(changed)]


def _shown(value: Any) -> str:
    return shorten(str(value), VALUE_LIMIT)


def _flat(spec: Facts, data: Facts, machine: Facts) -> Facts:
    return dict(flatten(spec)) | dict(flatten(data, "corpora")) | dict(flatten(machine, "machine"))


def _with_new_keys(spec: Facts) -> Facts:
    """Return a stored spec with the defaults of keys that Argosy did not have yet when it was stored."""
    try:
        filled: Facts = without_secrets(RunSpec.model_validate(spec).model_dump(mode="json"))
    except ValidationError:
        return spec
    return filled


def _only_moved(key: str) -> bool:
    """Where the data lies and how it was made may change; what it is may not, and is compared as `corpora`."""
    return key == "data.tokenizer" or (key.startswith("data.train.") and (key.endswith(".path") or ".prepare" in key))

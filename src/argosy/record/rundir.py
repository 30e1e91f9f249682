"""The run directory, `runs/<name>/`: the run spec, its resolved form, metrics, events and checkpoints.

Everything that watches a run reads this directory and nothing else, so it works over a shared file system and after
the job has died. A file lock keeps two trainers out of one directory; the kernel releases it however the trainer dies.

`resolved.json` holds the newest version of a run's spec, and earlier ones with the last step that each trained. A changed spec is stored when its first step has been taken. A start that has nothing to do, is refused, or dies before its
first step leaves no version. So a checkpoint is always compared with the spec that trained it, even if later steps of another
attempt were lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import ValidationError

from argosy.config.resolve import Resolved, flatten
from argosy.config.schema import RunSpec
from argosy.config.secrets import source_without_secrets, without_secrets
from argosy.config.units import LENGTH_KEYS
from argosy.echo import VALUE_LIMIT, shorten
from argosy.errors import ArgosyError
from argosy.files import replace_file, write_fix
from argosy.untrusted import read_object

# Keys that may differ when a run is resumed. All others must be as the run was started with.
FREE_TO_CHANGE = (
    "runs_dir", "log.", "checkpoint.", "eval", "data.order_cache", "data.validation", "corpora.validation", "fault.", "cluster",
)  # fmt: skip
# Keys that may differ, but change the numbers of later steps (layout and kernels by rounding and dropout). Changes are recorded.
CHANGES_LATER_STEPS = (
    *LENGTH_KEYS, "train.precision", "train.z_loss", "train.device",
    "train.deterministic", "optim.", "parallel.", "guard", "machine.", "model.vocab_multiple",
)  # fmt: skip
# The exception among them: an optimiser cannot load another's state.
HELD = ("optim.name",)
# How long a start waits for watchers to give the lock back. A look takes microseconds, unless the watcher is paused in it.
_WATCHERS_S, _RETRY_S = 10.0, 0.01


Facts = dict[str, Any]


class RunDir:
    """The paths of a run directory, its lock, and the stored spec."""

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
        """The planner's prediction."""
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
    def samples(self) -> Path:
        """The text that the model wrote while it trained."""
        return self.root / "samples.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeat"

    @property
    def debug(self) -> Path:
        """The directory of stacks and flight records of ranks that stalled or died."""
        return self.root / "debug"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def holds_a_run(self) -> bool:
        return self.resolved_file.exists() or self.checkpoints.exists()

    def open_for_training(self) -> None:
        """Create the directory and take its lock. Refuses if it cannot be written or another process holds the lock."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _take_lock(self._lock)
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
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ArgosyError:
        return ArgosyError(
            "run.unwritable",
            f"{self.root} cannot be written: {error.strerror or error}",
            key="runs_dir",
            value=str(self.root.parent),
            fix=write_fix(error, "make the directory writable, free some space, or choose another with runs_dir=PATH"),
        )

    def require_writable(self) -> None:
        """Refuse a directory that could not be created or written. Leaves nothing behind: it is for dry runs."""
        nearest = next(parent for parent in (self.root, *self.root.absolute().parents) if parent.exists())
        if not nearest.is_dir():
            raise self._unwritable(PermissionError(errno.EACCES, f"{nearest} is not a directory"))
        try:
            # Permissions do not tell for root, nor on file systems such as /proc.
            os.rmdir(tempfile.mkdtemp(prefix=".argosy-", dir=nearest))
        except OSError as error:
            raise self._unwritable(OSError(error.errno, f"{nearest} is not writable: {error.strerror}")) from error

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def lost(self) -> Literal["deleted", "moved"] | None:
        """Return whether the locked directory was deleted or moved; None if it is in place. Costs two or three system calls."""
        if self._lock is None:
            return None
        try:
            there: os.stat_result | None = os.stat(self.root / ".lock")
        except OSError:
            there = None
        try:
            ours = os.fstat(self._lock)
        except OSError:
            # A network file system gives a stale handle for a file that another machine deleted.
            return "deleted" if there is None else "moved"
        if there is not None and os.path.samestat(ours, there):
            return None if self.checkpoints.is_dir() else "deleted"
        return "deleted" if there is None and ours.st_nlink == 0 else "moved"

    def recreate(self) -> None:
        """Create a directory that was deleted again, and take its lock."""
        self.close()
        self.open_for_training()
        self.heartbeats.mkdir(exist_ok=True)

    def require_ours(self) -> None:
        """Refuse to write if another directory has taken the place of the locked one."""
        if self.lost() == "moved":
            raise ArgosyError(
                "run.busy",
                f"{self.root} was moved or replaced while this run was training",
                fix="move it back, and run it again",
            )

    def archive(self) -> Path:
        """Rename the directory to `<name>.old-<n>` and return the new path. The caller holds its lock, so no training run is moved."""
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
        """Write run.yaml and resolved.json.

        Args:
            source: the text of the run spec.
            data: identity of the data.
            machine: hardware and software that compute the run.
            start: what the weights were initialised from; stored once, since it never changes.
            step: the spec holds from the step after this one. Specs of earlier steps are kept.
            oldest: step of the oldest checkpoint; specs of earlier steps than that are dropped.
            identity: the run's id, if its checkpoints carry one and resolved.json is new.
        """
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
            raise self._unwritable(error) from None

    def _replace(self, document: Facts) -> None:
        replace_file(self.resolved_file, orjson.dumps(document, option=orjson.OPT_INDENT_2), sync=True)

    def require_room(self) -> None:
        """Refuse a directory in which resolved.json cannot be replaced. The test replaces it with a copy of itself."""
        try:
            replace_file(self.resolved_file, self.resolved_file.read_bytes(), sync=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritable(error) from None

    @property
    def identity(self) -> str | None:
        """The run's id, which its checkpoints carry. None if the run is older than ids, or resolved.json cannot be read."""
        try:
            found = self._stored()["id"]
            return found if isinstance(found, str) else None
        except ArgosyError:
            return None

    def spec_at(self, step: int) -> RunSpec | None:
        """Return the spec that trained `step`, or None if this version of Argosy cannot read it."""
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
        """Return the identity of the data that the run was started with, as `argosy.data.open` describes it."""
        return dict(self._stored().get("data", {}))

    def _stored(self) -> Facts:
        try:
            document = read_object(self.resolved_file, within=self.root)
            # An older Argosy stored secrets too. They are dropped here.
            found = {"spec": without_secrets(dict(document["spec"])), "data": dict(document["data"])}
            earlier = [dict(e) | {"spec": without_secrets(dict(e["spec"]))} for e in document.get("earlier", [])]
            return found | {name: document.get(name) for name in ("machine", "start", "id")} | {"earlier": earlier}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, reason: str) -> ArgosyError:
        return ArgosyError(
            "run.damaged",
            f"{self.resolved_file} cannot be read: {reason}",
            fix="restore it; or delete it, and the next `argosy train` writes it anew and goes on from the checkpoints, without knowing "
            "what has changed since",
        )

    def compare(self, resolved: Resolved, data: Facts, machine: Facts | None, *, step: int | None = None) -> list[str]:
        """Compare a new spec with the one that trained `step`; by default with the newest.

        Args:
            machine: facts of this machine; None if the run will resume on a machine that is not known yet.

        Returns:
            The allowed changes, one line each.

        Raises:
            ArgosyError: a key changed that must not.
        """
        if not self.resolved_file.exists():
            return []
        stored = self._stored()
        made = version_at(stored, step)
        # A machine fact that an older Argosy did not record counts as unchanged.
        known = {**machine, **(made["machine"] or {})} if machine else {}
        before = _flat(_with_new_keys(without_secrets(made["spec"])), stored["data"], known)
        after = _flat(without_secrets(resolved.spec.model_dump(mode="json")), data, machine or {})
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        free: tuple[str, ...] = FREE_TO_CHANGE + CHANGES_LATER_STEPS
        # In Megatron's order, the length of the run determines the order of all samples.
        if after.get("data.order") == "megatron":
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
    """Return whether `key` says only where the data lies or how it is prepared. Its content is compared as `corpora`."""
    return key == "data.tokenizer" or (key.startswith("data.train.") and (key.endswith(".path") or ".prepare" in key))


Document = dict[str, Any]
# The parts of resolved.json that may change between starts.
_PARTS = ("spec", "machine")


def version_at(document: Document, step: int | None) -> Document:
    """Return the spec and machine that trained `step`; without a step, the newest."""
    made = [earlier for earlier in document["earlier"] if step is not None and earlier["until"] >= step]
    return min(made, key=lambda earlier: int(earlier["until"])) if made else {part: document[part] for part in _PARTS}


def earlier_versions(document: Document, new: Document, step: int, oldest: int) -> list[Document]:
    """Return the earlier versions to store when `new` resumes after `step`: those of checkpoints from step `oldest` on."""
    before = version_at(document, step)
    kept = [earlier for earlier in document["earlier"] if oldest <= earlier["until"] < step]
    if step and any(before[part] != new[part] for part in _PARTS):
        kept.append({"until": step, **{part: before[part] for part in _PARTS}})
    return kept


def _take_lock(fd: int) -> None:
    """Take the lock of a trainer. Raises BlockingIOError if another trainer holds it.

    A watcher shares the lock for a moment to see whether a trainer holds it. A lock that this process can share too is held by
    watchers only, and is tried again.
    """
    deadline = time.monotonic() + _WATCHERS_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(_RETRY_S)

"""The checkpoints of a run: finding the newest good one, keeping the last few, setting bad ones aside.

`latest` is never recorded anywhere: it is found by looking, and believed only when every hash is right. What is removed is
first renamed, so that a half-deleted directory never looks like a checkpoint.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Set
from pathlib import Path

import orjson

from argosy.checkpoint.manifest import Checkpoint, verify
from argosy.errors import ArgosyError
from argosy.parallel.host_group import ALONE, HostGroup

_NAME = re.compile(r"step-(\d{8,})")


def latest(
    root: Path, report: Callable[[str], None], *, set_aside: bool = False, hosts: HostGroup = ALONE
) -> Checkpoint | None:
    """The newest checkpoint that passes its check, or None where there is none at all. Bad ones are reported and, once
    a good one is found, renamed (`set_aside`), so that they never count as checkpoints again. If only bad ones are
    left, that is a refusal."""
    faults = []
    bad: list[Path] = []
    names: list[str] = orjson.loads(hosts.tell(orjson.dumps([path.name for path in listed(root)])))
    for path in (root / name for name in names):
        try:
            found = verify(path, hosts)
        except ArgosyError as error:
            if error.code != "checkpoint.corrupt":
                raise
            faults.append(error.cause)
            bad.append(path)
            report(f"{path.name} is not used: {error.cause}")
            continue
        for damaged in bad if set_aside and hosts.is_first else ():
            damaged.rename(_free_name(damaged))
        return found
    if faults:
        raise ArgosyError(
            "checkpoint.corrupt",
            "no checkpoint passes its check:\n" + "\n".join(faults),
            fix=f"restore one from a backup, or move {root} away to start again from step 0",
        )
    return None


def listed(root: Path) -> list[Path]:
    """Checkpoint directories, newest first; what is still being written or removed has another name."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def superfluous(root: Path, keep: int, newest: int, keep_every: int | None = None) -> list[Path]:
    """All but the last `keep` up to the one of step `newest`, which is known to be good, and those at a multiple of
    `keep_every`."""
    older = [path for path in listed(root) if step_of(path) <= newest][keep:]
    return [path for path in older if keep_every is None or step_of(path) % keep_every]


def prune(root: Path, keep: int, newest: int, keep_every: int | None = None) -> None:
    for path in superfluous(root, keep, newest, keep_every):
        remove(path)
    sweep(root)


def sweep(root: Path) -> None:
    """Remove what a killed save or a killed removal left behind."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    if path.exists():
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _free_name(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"bad-{path.name}.{number}")).exists():
        number += 1
    return target


def require_names(have: Set[str], need: Set[str], path: Path) -> None:
    """Refuse a checkpoint that is not of this model, naming what is missing and what is left over."""
    if have != need:
        missing, extra = sorted(need - have), sorted(have - need)
        parts = [
            f"{label} {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
            for label, names in (("lacks", missing), ("has also", extra))
            if names
        ]
        raise ArgosyError(
            "checkpoint.mismatch",
            f"{path} is of another model: it {'; it '.join(parts)}",
            fix="check model and run name",
        )

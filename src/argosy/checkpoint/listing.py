"""`argosy ckpt ls` and `verify`: the checkpoints of a run, whether their hashes are right, and which one the run would resume
from."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.manifest import MANIFEST, Checkpoint, read_checkpoint, verify
from argosy.checkpoint.store import best_checkpoint, listed, named_checkpoint, step_of
from argosy.config.start import MODEL_FILE, model_root
from argosy.console.formats import amount, clock, volume
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Listed:
    """One row of the listing. `good` is None if the hashes were not checked; `resumes` marks the one `argosy train` would resume
    from, and `best` the one with the lowest validation loss."""

    path: str
    step: int
    age_s: float | None
    bytes: int
    consumed_samples: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    best: bool
    layout: str | None
    good: bool | None
    fault: str | None
    resumes: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_run(path: Path, *, check: bool = True) -> list[Listed]:
    """Return the checkpoints of a run, newest first; if `path` is one checkpoint, only that one."""
    root, path = model_root(path), named_checkpoint(path)
    found: list[Listed] = []
    # No run trains in the directory of an imported model.
    taken = (root / MODEL_FILE).exists()
    best = best_checkpoint(root / "checkpoints")
    for place in listed(root / "checkpoints") if root == path else [path]:
        checkpoint, fault = _opened(place, check)
        good = fault is None if check else (None if fault is None else False)
        resumes = good is True and not taken
        taken = taken or resumes
        found.append(_listed(place, checkpoint, good, fault, resumes=resumes, best=place == best))
    return found


def _opened(place: Path, check: bool) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint, or the fault that makes it unusable. `check` verifies the hashes."""
    try:
        checkpoint = verify(place) if check else read_checkpoint(place)
        if check:
            checkpoint.weights().check()
            checkpoint.optimizer().check()
    except ArgosyError as error:
        return None, error.cause
    return checkpoint, None


def _listed(
    place: Path, found: Checkpoint | None, good: bool | None, fault: str | None, *, resumes: bool, best: bool
) -> Listed:
    about = {} if found is None else found.progress.about
    written = about.get("time") or _changed(place)
    return Listed(
        path=str(place),
        step=step_of(place),
        age_s=None if written is None else max(0.0, time.time() - written),
        bytes=sum(file.stat().st_size for file in place.iterdir() if file.is_file()),
        consumed_samples=None if found is None else found.progress.consumed_samples,
        tokens=about.get("tokens"),
        loss=about.get("loss"),
        validation_loss=about.get("validation_loss"),
        best=best,
        layout=about.get("layout"),
        good=good,
        fault=fault,
        resumes=resumes,
    )


def _changed(place: Path) -> float | None:
    try:
        return (place / MANIFEST).stat().st_mtime
    except OSError:
        return None


def describe(path: Path, found: list[Listed]) -> str:
    """Return a table of checkpoints that fits 100 columns, without columns that none has a value for, and what its marks mean."""
    if not found:
        return f"{path} has no checkpoint yet"
    rows = [("step", "age", "size", "tokens", "loss", "validation", "state", "layout"), *map(_row, found)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    # Numbers are aligned to the right, layout and state to the left.
    lines = [
        "  ".join(
            cell.ljust(width) if column[0] in ("layout", "state") else cell.rjust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]
    lines += [f"step {one.step:,} is damaged: {one.fault}" for one in found if one.good is False]
    lines += ["next: the newest good one, which `train` goes on from"] if any(one.resumes for one in found) else []
    lines += ["best: the lowest validation loss, RUN/best"] if any(one.best for one in found) else []
    return "\n".join(lines)


def _row(one: Listed) -> tuple[str, ...]:
    state = {True: "good", False: "damaged", None: "not checked"}[one.good]
    marks = [mark for mark, is_so in (("next", one.resumes), ("best", one.best)) if is_so]
    return (
        f"{one.step:,}",
        "" if one.age_s is None else clock(one.age_s),
        volume(one.bytes),
        "" if one.tokens is None else amount(one.tokens),
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.validation_loss is None else f"{one.validation_loss:.4f}",
        ", ".join([state, *marks]),
        one.layout or "",
    )

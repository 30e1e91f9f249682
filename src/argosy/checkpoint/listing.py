"""`argosy ckpt ls`: what checkpoints a run has, whether they can be trusted, and which one it would go on from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.manifest import verify
from argosy.checkpoint.store import listed
from argosy.config.start import model_root
from argosy.errors import ArgosyError
from argosy.record.console import amount


@dataclass(frozen=True)
class Listed:
    path: str
    step: int
    consumed_samples: int | None
    bytes: int
    good: bool | None  # None: not checked
    fault: str | None
    resumes: bool  # whether `argosy train` would go on from this one

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_run(path: Path, *, check: bool = True) -> list[Listed]:
    """Newest first."""
    found: list[Listed] = []
    taken = False
    for place in listed(model_root(path) / "checkpoints"):
        size = sum(file.stat().st_size for file in place.iterdir() if file.is_file())
        step = int(place.name.removeprefix("step-"))
        samples, fault = None, None
        if check:
            try:
                samples = verify(place).progress.consumed_samples
            except ArgosyError as error:
                fault = error.cause
        good = fault is None if check else None
        resumes = good is True and not taken
        taken = taken or resumes
        found.append(Listed(str(place), step, samples, size, good, fault, resumes))
    return found


def describe(path: Path, found: list[Listed]) -> str:
    if not found:
        return f"{path} has no checkpoint yet"
    lines = [f"{'step':>10}  {'size':>9}  {'samples':>12}  state"]
    for one in found:
        state = {True: "good", False: f"damaged: {one.fault}", None: "not checked"}[one.good]
        samples = "" if one.consumed_samples is None else f"{one.consumed_samples:,}"
        mark = "  <- the newest good one: what `train` goes on from" if one.resumes else ""
        lines.append(f"{one.step:>10,}  {amount(one.bytes):>8}B  {samples:>12}  {state}{mark}")
    return "\n".join(lines)

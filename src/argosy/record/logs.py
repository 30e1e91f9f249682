"""The logs of ranks, `logs/<attempt>/<rank>.log`, for whoever reads them; `argosy.record.relay` writes them."""

from __future__ import annotations

from pathlib import Path

from argosy.record.relay import BEGINNING, MARK

_END_BYTES = 64 << 10  # of a log, in which its last lines are


def newest_attempt(run: Path) -> Path | None:
    """The directory of the last start of a run that has left a log."""
    numbers = [int(path.name) for path in (run / "logs").glob("*") if path.name.isdecimal()]
    return run / "logs" / str(max(numbers)) if numbers else None


def of_last_start(lines: list[str]) -> list[str]:
    """A log may begin with what was said by starts that did not come to train."""
    begins = [i for i, line in enumerate(lines) if line.startswith(BEGINNING)]
    return lines[begins[-1] :] if begins else lines


def last_words(run: Path, rank: int, count: int = 3) -> list[str]:
    """The last lines that a rank wrote, each with the name of its log."""
    attempt = newest_attempt(run)
    if attempt is None:
        return []
    path = attempt / f"{rank}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    said = [line for line in of_last_start(lines) if line.strip() and not line.startswith(MARK)]
    return [f"{path.relative_to(run)}: {line[:300]}" for line in said[-count:]]

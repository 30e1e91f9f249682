"""The directory that an agent shares with its ranks, one for each attempt: it holds what exit codes cannot carry.

A rank writes its process id, its heartbeat page, and the reason of a failure or the code of an orderly exit. On request it
writes its Python stacks and its collectives. Stacks are requested by a signal, whose handler runs whatever the interpreter is
doing; collectives by a named pipe, which a thread of the rank reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Environment variables of a rank.
_DIRECTORY, _ATTEMPT, _AGENT = "ARGOSY_RANKS", "ARGOSY_ATTEMPT", "ARGOSY_AGENT"


class RankFiles:
    """Paths of the files of each rank."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankFiles | None:
        """Return the files of the agent that started this process, or None."""
        directory = environ.get(_DIRECTORY)
        return None if directory is None else cls(Path(directory))

    def announce(self, attempt: int) -> None:
        """Create the directory and pass it to the ranks started from now on, by environment variables."""
        self.root.mkdir(parents=True)
        os.environ |= {_DIRECTORY: str(self.root), _ATTEMPT: str(attempt), _AGENT: str(os.getpid())}

    @staticmethod
    def forget() -> None:
        for name in (_DIRECTORY, _ATTEMPT, _AGENT):
            os.environ.pop(name, None)

    def pids(self) -> dict[int, int]:
        return {int(file.stem): int(file.read_text()) for file in self.root.glob("*.pid")}

    def pid(self, rank: int) -> Path:
        return self.root / f"{rank}.pid"

    def page(self, rank: int) -> Path:
        return self.root / f"{rank}.page"

    def stacks(self, rank: int) -> Path:
        return self.root / f"{rank}.stacks"

    def question(self, rank: int) -> Path:
        return self.root / f"{rank}.question"

    def flight(self, rank: int) -> Path:
        return self.root / f"{rank}.flight.json"

    def error(self, rank: int) -> Path:
        return self.root / f"{rank}.error"

    def exit(self, rank: int) -> Path:
        return self.root / f"{rank}.exit"

    def exit_codes(self) -> list[int]:
        return [int(file.read_text()) for file in self.root.glob("*.exit")]

    def errors(self) -> list[tuple[int, str]]:
        """Return (rank, reason) of failed ranks, in the order of failure as far as file times tell."""
        files = sorted(self.root.glob("*.error"), key=lambda file: (file.stat().st_mtime_ns, int(file.stem)))
        return [(int(file.stem), file.read_text().rstrip()) for file in files]


def attempt(environ: Mapping[str, str]) -> int:
    """Return how often the agent has restarted its ranks."""
    return int(environ.get(_ATTEMPT, "0"))


def agent(environ: Mapping[str, str]) -> int:
    """Return the process id of the agent that started this process."""
    return int(environ[_AGENT])


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(f"{path.suffix}-partial")
    partial.write_text(text)
    partial.rename(path)

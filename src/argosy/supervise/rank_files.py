"""The directory that an agent and the ranks it started share, one for each attempt: what exit codes cannot carry.

A rank leaves its process id, the page that says where it is, the reason it failed or the code of an orderly end. Asked to,
it leaves its Python stacks and the record of its collectives: by a signal, whose handler runs whatever the interpreter is
doing, and by a pipe, on which a thread of its own waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_DIRECTORY, _ATTEMPT, _AGENT = "ARGOSY_RANKS", "ARGOSY_ATTEMPT", "ARGOSY_AGENT"  # in the environment of a rank


class RankFiles:
    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankFiles | None:
        """Those of the agent that started this process."""
        directory = environ.get(_DIRECTORY)
        return None if directory is None else cls(Path(directory))

    def announce(self, attempt: int) -> None:
        """To the ranks started from now on."""
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
        """Why ranks failed, in the order they said so, as far as the file system's clock tells."""
        files = sorted(self.root.glob("*.error"), key=lambda file: (file.stat().st_mtime_ns, int(file.stem)))
        return [(int(file.stem), file.read_text().rstrip()) for file in files]


def attempt(environ: Mapping[str, str]) -> int:
    """How often the ranks were started before, by the agent that started this process."""
    return int(environ.get(_ATTEMPT, "0"))


def agent(environ: Mapping[str, str]) -> int:
    """The process that started this one."""
    return int(environ[_AGENT])


def leave(path: Path, text: str) -> None:
    partial = path.with_suffix(f"{path.suffix}-partial")
    partial.write_text(text)
    partial.rename(path)

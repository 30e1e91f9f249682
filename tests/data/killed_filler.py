"""Fill a block cache and die between any two changes of its files. This is a program, since tests cannot kill themselves."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argosy.data.remote.cache import CHECKSUM_BYTES, BlockCache

SIZE, ROOM = 1000, 4
LIMIT = ROOM * (SIZE + CHECKSUM_BYTES)
KILLED = 9
CHANGES = ("replace", "unlink", "pwrite", "ftruncate")


def fill(cache: Path, names: range, limit: int | None) -> None:
    for name in names:
        BlockCache(cache, limit).fill(
            f"{cache}/argosy-{'0' * 32}/blocks/a-{'0' * 16}-1/{name:08d}", SIZE, lambda: bytes(SIZE)
        )


def bytes_in(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("argosy-*/blocks/*/*"))


def die_after(changes: int) -> None:
    """End this process, as SIGKILL does, in place of the change after this many."""
    left = itertools.count(changes, -1)

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_or_die(*arguments: Any, **named: Any) -> Any:
            if next(left) == 0:
                os._exit(KILLED)
            return change(*arguments, **named)

        return change_or_die

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))


def main(directory: str) -> None:
    """Print how many changes a process made that was not killed, after the limit has held behind a kill at each of them."""
    for limit in (None, LIMIT):
        for changes in itertools.count():
            ended = [
                kill_and_fill(Path(directory, f"{limit}-{changes}-{held}"), held, limit, changes)
                for held in (ROOM - 1, ROOM)
            ]
            if ended == [0, 0]:
                break
        print(changes)


def kill_and_fill(cache: Path, held: int, limit: int | None, changes: int) -> int:
    """Kill a process that adds blocks to `held` ones, fill the cache up to its limit, and return the status of the process."""
    fill(cache, range(held), LIMIT)
    if (child := os.fork()) == 0:
        die_after(changes)
        fill(cache, range(10, 12), limit)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    for name in range(20, 20 + 2 * ROOM):
        fill(cache, range(name, name + 1), LIMIT)
        assert bytes_in(cache) <= LIMIT, f"killed after {changes} changes: {bytes_in(cache)} of {LIMIT}"
    return status


if __name__ == "__main__":
    main(sys.argv[1])

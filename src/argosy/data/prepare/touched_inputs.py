"""Find inputs that may have been rewritten in place, and compare them with the parts that were made of them.

A file may be rewritten with the same size, modification time and inode, as `rsync --inplace --times` does. Its ctime always changes
then. But its ctime also changes with its rights, its name and its hard links, and a copy on another machine has its own. So another
ctime refuses nothing by itself: the blocks of the finished parts are read again, which is much cheaper than making the parts, and only
other content is refused. Changes in blocks without a part do no harm, since these are read from now on.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from argosy.console.progress_bar import ProgressBar
from argosy.data.prepare.part_runner import PartRunner
from argosy.data.prepare.parts import CheckedPart, PartName
from argosy.data.prepare.work_plan import Plan
from argosy.data.prepare.workers import Task
from argosy.data.text.inputs import InputFile
from argosy.errors import ArgosyError

_log = logging.getLogger(__name__)


class TouchedWork(Protocol):
    """A job whose parts are compared with its inputs."""

    files: list[InputFile]
    groups: list[list[InputFile]]
    parts: Path

    @property
    def plan(self) -> Plan: ...

    @property
    def overwrite(self) -> bool: ...

    @property
    def own_shards(self) -> range: ...

    def shard_of(self, name: PartName) -> int: ...


def check_since_plan(work: TouchedWork, runner: PartRunner) -> None:
    """Refuse inputs that an earlier attempt read with other content. Only those with another ctime are read again."""
    try:
        stored = (work.parts / "plan").read_bytes()
    except FileNotFoundError:
        # Another process has just finished the job.
        return
    _compare(work, runner, work.plan.touched(stored))


def must_start_over(work: TouchedWork, runner: PartRunner) -> bool:
    """Return whether an earlier attempt read inputs with other content. Refuse them, unless the job overwrites its output."""
    try:
        check_since_plan(work, runner)
    except ArgosyError as error:
        if error.code != "data.input-changed" or not work.overwrite:
            raise
        return True
    return False


def check_since_listed(work: TouchedWork, runner: PartRunner) -> None:
    """Refuse inputs whose content changed since this process listed them. Only those with another ctime are read again."""
    _compare(work, runner, {file.path for file in work.files if file.ctime and file.ctime != _ctime_of(file)})


def _ctime_of(file: InputFile) -> int:
    try:
        return os.stat(file.location).st_ctime_ns
    except OSError:
        # All of it has been read.
        return file.ctime


def _compare(work: TouchedWork, runner: PartRunner, touched: Collection[str]) -> None:
    tasks = list(_tasks(work, touched)) if touched else []
    if not tasks:
        return
    _log.info("another ctime of %d inputs: comparing the content of %d finished parts", len(touched), len(tasks))
    refusals: list[tuple[PartName, dict[str, Any]]] = []
    with ProgressBar("compare", len(tasks), " parts") as progress:
        # The first difference is enough, but the workers finish what they have begun.
        for name, refusal in runner.run(task for task in tasks if not refusals):
            if refusal is not None:
                refusals.append((name, refusal))
            progress.advance(1)
    if refusals:
        raise ArgosyError(**min(refusals)[1])


def _tasks(work: TouchedWork, touched: Collection[str]) -> Iterator[Task]:
    """Yield the finished parts of these inputs: all of this machine's shards, and the first of each input of the others."""
    groups = {number for number, group in enumerate(work.groups) if any(file.path in touched for file in group)}
    try:
        names = [found for name in os.listdir(work.parts) if (found := re.fullmatch(r"(\d+)-(\d+)\.json", name))]
    except FileNotFoundError:
        # Another process has just finished the job.
        return
    seen: set[int] = set()
    for part in sorted(CheckedPart(int(name[1]), int(name[2])) for name in names):
        if part.group in groups and (part.group not in seen or work.shard_of(part) in work.own_shards):
            seen.add(part.group)
            yield part, work.groups[part.group]

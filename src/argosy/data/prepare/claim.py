"""Claim an output directory for a job: a new one, or one with an unfinished attempt of the same job.

The plan of the job is stored with its parts, so a second attempt resumes where the first stopped and a different job is refused.
A process holds locks while it works.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Protocol

from argosy.data.prepare.locks import PieceLocks, locked
from argosy.data.prepare.parts import PartName, clear_unfinished
from argosy.data.prepare.work_plan import Plan
from argosy.errors import ArgosyError
from argosy.files import create_file

_log = logging.getLogger(__name__)


class ClaimedWork(Protocol):
    """A job that makes shards in an output directory."""

    output: Path
    parts: Path

    @property
    def plan(self) -> Plan:
        """Everything that determines the bytes of the output."""

    @property
    def overwrite(self) -> bool:
        """Whether the output of another job may be replaced."""

    def shard_of(self, name: PartName) -> int:
        """Return the shard of a part."""

    def is_done(self) -> bool:
        """Return True if the output is finished."""

    def is_result(self) -> bool:
        """Return True if the output is known to be the finished result of the same plan."""

    def clear(self) -> None:
        """Remove the output of another job."""


class OutputClaim:
    """The claim of one process on the output of a job.

    Args:
        work: The job.
        held: The shards that this process locks for as long as it works.
    """

    def __init__(self, work: ClaimedWork, held: range) -> None:
        self.work, self.held = work, held
        self._locks: PieceLocks | None = None

    @property
    def locks(self) -> PieceLocks:
        """The locks of this process."""
        if self._locks is None:
            raise RuntimeError("the output is not claimed")
        return self._locks

    def is_finished(self) -> bool:
        """Return True if this process came after others had finished the whole job, and may not overwrite it."""
        work = self.work
        if work.overwrite or not work.is_result():
            return False
        _log.info("%s is finished: nothing is left to do", work.output)
        # A kill just before the end of the job leaves the parts.
        shutil.rmtree(work.parts, ignore_errors=True)
        return True

    def take(self) -> bool:
        """Lock the shards to hold. Return False if other processes have finished the whole job."""
        try:
            return self._take()
        except FileNotFoundError:
            # Another process may have finished the job just now, and removed its parts.
            if not self.is_finished():
                raise
            self.release()
            return False

    def _take(self) -> bool:
        work, plan = self.work, self.work.parts / "plan"
        if self.is_finished():
            return False
        if (work.is_done() or plan.exists()) and not self._resume_or_clear(plan):
            return False
        work.parts.mkdir(parents=True, exist_ok=True)
        # Another machine may have started just now; its plan must be the same.
        if not create_file(plan, work.plan.content()) and not self._resume_or_clear(plan):
            return False
        self._locks = PieceLocks(work.parts / "locks")
        self._locks.take_all(self.held, _log.info)
        # The process that held the locks may have finished and removed the parts.
        if not self._locks.is_current():
            self.release()
            return False if work.is_done() else self.take()
        # The job may have been finished before the plan was created.
        if self.is_finished():
            self.release()
            return False
        # Without locks, another process may be writing these parts.
        if self._locks.are_kept:
            clear_unfinished(work.parts, lambda part: work.shard_of(part) in self.held)
        return True

    def release(self) -> None:
        """Release the locks."""
        if self._locks is not None:
            self._locks.close()
            self._locks = None

    def _resume_or_clear(self, plan: Path) -> bool:
        """Keep the parts of the same job, or remove what `--overwrite` may replace. Refuse anything else.

        Returns:
            False if other processes have just finished the whole job.
        """
        work = self.work
        refusal = self._refusal(plan)
        # Resume where the last attempt stopped.
        if refusal is None:
            return True
        if work.is_done() and self.is_finished():
            return False
        if not work.overwrite:
            if work.is_done():
                # A kill between the manifest and the end of the job leaves the parts.
                shutil.rmtree(work.parts, ignore_errors=True)
            raise refusal
        self.clear()
        return True

    def clear(self) -> None:
        """Remove the output of another job, and its parts. Refuse it while another process works on them."""
        work = self.work
        self.release()
        work.parts.mkdir(parents=True, exist_ok=True)
        with locked(work.parts / "locks", wait=False) as free:
            if not free:
                raise ArgosyError(
                    "data.output-exists",
                    f"another process is making a corpus in {work.output}",
                    key="--output",
                    value=str(work.output),
                    fix="choose another directory, or end that process first",
                )
            work.clear()
            shutil.rmtree(work.parts, ignore_errors=True)

    def _refusal(self, plan: Path) -> ArgosyError | None:
        """Return the error that refuses what is in the output, or None if it is an unfinished attempt of the same job."""
        work = self.work
        if not work.is_done():
            return work.plan.difference(plan.read_bytes(), work.output)
        return ArgosyError(
            "data.output-exists",
            f"{work.output} already holds a prepared corpus",
            key="--output",
            value=str(work.output),
            fix="choose another directory, or pass --overwrite to replace it",
        )

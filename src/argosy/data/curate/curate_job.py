"""`argosy data curate`: filter, mask and deduplicate text, in one pass over every document.

    DIR/shard-00000.jsonl.zst …  the documents as JSON lines, or
    DIR/shard-00000.bin, .idx …  a tokenised corpus with its manifest
    DIR/quarantine.ndjson        records that could not be used, with file and offset
    DIR/curation.json            written last: what each step removed, with examples

Blocks of the inputs become parts (`curated_part`), in any process. When all parts exist, duplicates are searched among all of them
(`duplicate_search`), and the shards are written without them. Every phase leaves files behind, so a killed job resumes. Machines that
share the output directory divide each phase while they run (`argosy.data.prepare.piece_queue`): what a killed one had taken is done by
another, and one that comes late finds less to do, or nothing. The bytes do not depend on the number of processes, machines or restarts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path

import orjson

from argosy.console.progress_bar import ProgressBar
from argosy.data.curate.array_file import read_arrays, write_arrays
from argosy.data.curate.curate_report import CurationReport, finish_curation
from argosy.data.curate.curate_work import (
    REPORT_FILE,
    CurateSharing,
    CurateWork,
    list_path,
    part_facts,
    part_name,
    shard_path,
)
from argosy.data.curate.curated_part import CuratedFacts
from argosy.data.curate.curated_shards import ShardWriter, kept_paths
from argosy.data.curate.duplicate_search import Duplicates, JobParts, SearchTask, decide, forget_parts, searches
from argosy.data.curate.pipeline_spec import Pipeline
from argosy.data.prepare.claim import OutputClaim
from argosy.data.prepare.part_runner import PartRunner
from argosy.data.prepare.parts import PartName
from argosy.data.prepare.piece_queue import PieceQueue
from argosy.data.prepare.resuming import cannot_write, resumed
from argosy.data.prepare.touched_inputs import check_since_listed, must_start_over
from argosy.data.prepare.workers import Task
from argosy.data.text.inputs import require_no_texts
from argosy.errors import ArgosyError
from argosy.files import replace_file


def curate(pipeline: Pipeline, sharing: CurateSharing) -> CurationReport | None:
    """Curate, together with the other machines that run the same pipeline, and stay until the output is finished.

    Returns:
        The report of the whole job. None on a file system without locks if the work of other machines is missing. Then the same
        command has to be run once more when the others have ended.
    """
    return resumed(lambda: _curate(pipeline, sharing))


def _curate(pipeline: Pipeline, sharing: CurateSharing) -> CurationReport | None:
    job = CurateJob(CurateWork(pipeline, sharing))
    # A late machine starts no workers.
    if job.is_finished():
        return CurationReport.read(job.work.output)
    try:
        with job.runner:
            if job.claim() and job.has_same_inputs():
                job.make_parts()
                check_since_listed(job.work, job.runner)
                if not job.has_all(list_path):
                    return None
                job.find_duplicates()
                job.write_shards()
                if not job.has_all(shard_path):
                    return None
                job.finish()
    except OSError as error:
        # Another process may have finished the job just now, and removed its parts.
        if not job.work.is_result():
            raise cannot_write(job.work.output, error) from None
    except ArgosyError:
        # A worker failed for the same reason.
        if not job.is_finished():
            raise
    finally:
        job.release()
    return CurationReport.read(job.work.output)


class Phase(IntEnum):
    """The phases of a job, each of which needs all pieces of those before it."""

    PARTS = 0
    CANDIDATES = 1
    CONFIRM = 2
    DECIDE = 3
    SHARDS = 4
    FINISH = 5


class CurateJob:
    """The work of this machine: its own shards first, then what no other machine has taken."""

    def __init__(self, work: CurateWork) -> None:
        self.work = work
        self.runner = PartRunner(work)
        self._claim = OutputClaim(work, range(0))
        # group -> a block known to be past its end
        self._ends: dict[int, int] = {}

    def is_finished(self) -> bool:
        """Return True if the output is the finished result of this pipeline."""
        return self._claim.is_finished()

    def claim(self) -> bool:
        """Claim the output directory. Return False if the job is finished."""
        work = self.work
        if not work.is_done() and not work.parts.exists():
            require_no_texts(work.output, ours="")
        if not self._claim.take():
            return False
        if work.tokenizer is not None:
            name, content = work.tokenizer.stored()
            replace_file(work.output / name, content)
        return True

    def has_same_inputs(self) -> bool:
        """Refuse inputs that an earlier attempt read with other content. With `overwrite`, claim the output anew."""
        if not must_start_over(self.work, self.runner):
            return True
        self._claim.clear()
        return self.claim()

    def release(self) -> None:
        """Release the locks."""
        self._claim.release()

    def make_parts(self) -> None:
        """Make the parts of all shards, with the other machines."""
        with ProgressBar("curate", self.runner.input_bytes, "B") as progress:
            self._shards(Phase.PARTS, list_path).divide(
                lambda shards: self._make_parts(shards, progress), own=self.work.own_shards
            )

    def has_all(self, path: Callable[[CurateWork, int], Path]) -> bool:
        """Return True if the file of every shard exists, or the job is finished."""
        work = self.work
        return all(path(work, shard).exists() for shard in range(work.shards)) or work.is_reported()

    def find_duplicates(self) -> None:
        """Search for duplicates among the parts of all machines, with the other machines."""
        work, steps = self.work, self.work.part_options.comparing
        forget_parts()
        found = work.parts / "duplicates"
        if found.exists():
            return
        listed = part_facts(work)
        JobParts(tuple(listed), tuple(facts.documents for facts in listed.values())).write(work.parts)
        for phase, tasks in zip((Phase.CANDIDATES, Phase.CONFIRM), searches(work.parts, steps), strict=True):
            self._search(phase, tasks)
        self._queue(Phase.DECIDE, {0: found}).divide(lambda _: write_arrays(found, vars(decide(work.parts, steps))))

    def write_shards(self) -> None:
        """Write all shards without duplicates, with the other machines."""
        self._shards(Phase.SHARDS, shard_path).divide(self._write_shards, own=self.work.own_shards)

    def finish(self) -> None:
        """Write the report, and remove the parts."""
        self._queue(Phase.FINISH, {0: self.work.output / REPORT_FILE}).divide(lambda _: finish_curation(self.work))

    def _queue(self, phase: Phase, paths: Mapping[int, Path]) -> PieceQueue:
        return PieceQueue(
            self._claim.locks, phase, f"pieces of phase {phase.name.lower()}", paths, self.work.is_reported
        )

    def _shards(self, phase: Phase, path: Callable[[CurateWork, int], Path]) -> PieceQueue:
        """Return the shards. On a file system without locks they are those of this machine alone."""
        shards = range(self.work.shards) if self._claim.locks.are_kept else self.work.own_shards
        return self._queue(phase, {shard: path(self.work, shard) for shard in shards})

    def _make_parts(self, shards: list[int], progress: ProgressBar) -> None:
        """Make the parts of these shards, and list them for the other machines."""
        found: dict[int, dict[PartName, CuratedFacts]] = {shard: {} for shard in shards}
        for name, facts in self.runner.run(self._tasks(set(shards))):
            if facts.past_end:
                self._ends[name.group] = min(name.block, self._ends.get(name.group, name.block))
            else:
                found[self.work.shard_of(name)][name] = facts
            progress.advance(facts.input_bytes)
        for shard, facts_of in found.items():
            listed = [asdict(facts_of[name]) | {"name": str(name)} for name in sorted(facts_of)]
            replace_file(list_path(self.work, shard), orjson.dumps(listed), sync=True)

    def _search(self, phase: Phase, tasks: Sequence[SearchTask]) -> None:
        """Do all tasks, with the other machines. Each machine begins at another place, and takes the next task when a worker is free."""
        numbers = {task: number for number, task in enumerate(tasks)}
        queue = self._queue(phase, {number: task.path for task, number in numbers.items()})
        with ProgressBar("compare", len(tasks), " tasks") as progress:
            while missing := queue.missing():
                first = len(missing) * self.work.options.machine // self.work.options.machines
                taken = queue.take([*missing[first:], *missing[:first]])
                done = 0
                for task, _ in self.runner.run((tasks[number], None) for number in taken):
                    queue.release(numbers[task])
                    progress.advance(1)
                    done += 1
                if not done:
                    queue.wait(missing)

    def _write_shards(self, shards: list[int]) -> None:
        work = self.work
        duplicates = Duplicates(**read_arrays(work.parts / "duplicates"))
        own = [name for name in part_facts(work) if work.shard_of(part_name(name)) in shards]
        if not work.makes_tokens:
            with ProgressBar("write", len(own), " parts") as progress:
                for _ in self.runner.run((task, None) for task in kept_paths(work, own)):
                    progress.advance(1)
        for shard in shards:
            writer = ShardWriter(work, shard, duplicates)
            try:
                for name in own:
                    if work.shard_of(part_name(name)) == shard:
                        writer.add(name)
                facts = writer.finish()
            except BaseException:
                writer.abandon()
                raise
            replace_file(shard_path(work, shard), orjson.dumps(facts), sync=True)

    def _tasks(self, shards: set[int]) -> Iterator[Task]:
        """Yield the parts of these shards and their inputs. Where a compressed file ends is known only after a read past it."""
        for group, files in enumerate(self.work.groups):
            for block in itertools.count():
                name = PartName(group, block)
                if block >= self._ends.get(group, block + 1) or self.work.is_beyond(name):
                    break
                if self.work.shard_of(name) in shards:
                    yield name, files


def preview_of(pipeline: Pipeline, sharing: CurateSharing) -> str:
    """Return the report of a dry run, after the checks that need no text."""
    work = CurateWork(pipeline, sharing)
    lines = [f"{file.path}  {file.size:,} bytes" for file in work.files]
    total = sum(file.size for file in work.files)
    kind = "tokens" if work.makes_tokens else "JSON lines"
    lines.append(f"{len(work.files)} files, {total:,} bytes -> {work.output} ({work.shards} shards of {kind})")
    lines += [f"{label}: {step.model_dump_json()}" for label, step in pipeline.steps]
    for _, step in pipeline.steps:
        step.check()
    return "\n".join(lines)

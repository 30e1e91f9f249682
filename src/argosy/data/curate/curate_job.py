"""`argosy data curate`: filter, mask and deduplicate text, in one pass over every document.

    DIR/shard-00000.jsonl.zst …  the documents as JSON lines, or
    DIR/shard-00000.bin, .idx …  a tokenised corpus with its manifest
    DIR/quarantine.ndjson        records that could not be used, with file and offset
    DIR/curation.json            written last: what each step removed, with examples

Blocks of the inputs become parts (`curated_part`), in any process. When all parts exist, duplicates are searched among all of them
(`duplicate_search`), and the shards are written without them. Every stage leaves files behind, so a killed job resumes, and each machine
does what it can: the parts of its shards, the search if it is the last with its parts, and its shards once the search is done.
The bytes do not depend on the number of processes, machines or restarts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import orjson

from argosy.console.progress_bar import ProgressBar
from argosy.data.curate.array_file import read_arrays, write_arrays
from argosy.data.curate.curate_report import CurationReport, finish_curation
from argosy.data.curate.curate_work import CurateSharing, CurateWork, list_path, part_facts, part_name, shard_path
from argosy.data.curate.curated_part import CuratedFacts
from argosy.data.curate.curated_shards import ShardWriter, kept_paths
from argosy.data.curate.duplicate_search import Duplicates, JobParts, decide, forget_parts, searches
from argosy.data.curate.pipeline_spec import Pipeline
from argosy.data.prepare.claim import OutputClaim
from argosy.data.prepare.locks import locked
from argosy.data.prepare.part_runner import PartRunner
from argosy.data.prepare.parts import PartName, cannot_write
from argosy.data.prepare.workers import Task
from argosy.data.text.inputs import require_no_texts
from argosy.files import replace_file

_log = logging.getLogger(__name__)


def curate(pipeline: Pipeline, sharing: CurateSharing) -> CurationReport | None:
    """Do this machine's part of a curation.

    Returns:
        The report of the whole job, or None if the shards of other machines are missing. Then the same command has to be run
        once more when the others have ended.
    """
    job = CurateJob(CurateWork(pipeline, sharing))
    try:
        with job.runner:
            if not job.claim():
                return CurationReport.read(job.work.output)
            job.make_parts()
            if not job.has_all_parts():
                return None
            job.find_duplicates()
            job.write_shards()
            return finish_curation(job.work)
    except OSError as error:
        raise cannot_write(job.work.output, error) from None
    finally:
        job.release()


class CurateJob:
    """The work of this machine."""

    def __init__(self, work: CurateWork) -> None:
        self.work = work
        self.runner = PartRunner(work)
        self._claim = OutputClaim(work)
        # group -> a block known to be past its end
        self._ends: dict[int, int] = {}

    def claim(self) -> bool:
        """Lock the output directory. Return False if the job is finished."""
        work = self.work
        if not work.is_done() and not work.parts.exists():
            require_no_texts(work.output, ours="")
        if not self._claim.take():
            return False
        if work.tokenizer is not None:
            name, content = work.tokenizer.stored()
            replace_file(work.output / name, content)
        return True

    def release(self) -> None:
        """Release the locks."""
        self._claim.release()

    def make_parts(self) -> None:
        """Make the parts of this machine's shards, and list them for the others."""
        missing = [shard for shard in self.work.own_shards if not list_path(self.work, shard).exists()]
        found: dict[int, dict[PartName, CuratedFacts]] = {shard: {} for shard in missing}
        with ProgressBar("curate", self.runner.input_bytes, "B") as progress:
            for name, facts in self.runner.run(self._tasks(set(missing))) if missing else ():
                if facts.past_end:
                    self._ends[name.group] = min(name.block, self._ends.get(name.group, name.block))
                else:
                    found[self.work.shard_of(name)][name] = facts
                progress.advance(facts.input_bytes)
        for shard, facts_of in found.items():
            listed = [asdict(facts_of[name]) | {"name": str(name)} for name in sorted(facts_of)]
            replace_file(list_path(self.work, shard), orjson.dumps(listed), sync=True)

    def has_all_parts(self) -> bool:
        """Return True if every machine has made its parts."""
        return all(list_path(self.work, shard).exists() for shard in range(self.work.shards))

    def find_duplicates(self) -> None:
        """Search for duplicates among the parts of all machines, unless another process has done so."""
        work, steps = self.work, self.work.part_options.comparing
        forget_parts()
        with locked(work.parts / "search-lock", wait=True):
            if (work.parts / "duplicates").exists():
                return
            listed = part_facts(work)
            JobParts(tuple(listed), tuple(facts.documents for facts in listed.values())).write(work.parts)
            for tasks in searches(work.parts, steps):
                self._run("compare", tasks)
            write_arrays(work.parts / "duplicates", vars(decide(work.parts, steps)))

    def write_shards(self) -> None:
        """Write this machine's shards without duplicates."""
        work = self.work
        names = list(part_facts(work))
        missing = [shard for shard in work.own_shards if not shard_path(work, shard).exists()]
        duplicates = Duplicates(**read_arrays(work.parts / "duplicates"))
        own = [name for name in names if work.shard_of(part_name(name)) in missing]
        if not work.makes_tokens:
            self._run("write", kept_paths(work, own))
        for shard in missing:
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

    def _run(self, label: str, tasks: Iterable[Any]) -> None:
        listed = list(tasks)
        with ProgressBar(label, len(listed), " tasks") as progress:
            for _ in self.runner.run((task, None) for task in listed):
                progress.advance(1)


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

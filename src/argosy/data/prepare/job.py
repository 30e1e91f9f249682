"""`argosy data prepare`: from text to a corpus directory, in one streaming pass shared by processes and machines.

    DIR/shard-00000.bin, .idx …  the tokens, as Megatron reads them
    DIR/shard-00000.blocks …     hashes of their blocks
    DIR/tokenizer.json           the tokenizer they were made with
    DIR/quarantine.jsonl         records that could not be used, with file and offset
    DIR/manifest.json            written last: counts, hashes, fingerprint

With several keys each has such a directory of its own, DIR/KEY, and document n of each is of the same record.
Inputs are cut into blocks, each block becomes a part (`argosy.data.prepare.parts`), and the parts of a shard are joined. Which
shard a block belongs to depends on the inputs alone, so the bytes do not depend on how many processes or machines
worked, nor on how often they were killed. Documents in equal documents out plus quarantined; the sum is checked.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from argosy.config.seeds import derive_seed
from argosy.console.progress_bar import ProgressBar
from argosy.data.corpus.corpus_manifest import FILE_NAME, Manifest
from argosy.data.prepare.crew import Crew
from argosy.data.prepare.finish import finish
from argosy.data.prepare.join import Joiner, books_of
from argosy.data.prepare.locks import is_there, lock_shards
from argosy.data.prepare.parts import PartName, cannot_write, clear_unfinished, read_facts
from argosy.data.prepare.work import QUARANTINE_FILE, PrepareOptions, Work
from argosy.data.prepare.workers import Task
from argosy.data.text.input_files import fingerprint_now, require_same
from argosy.data.text.inputs import InputFile, find_inputs, require_no_texts
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.files import create_file, replace_file


def prepare(
    inputs: Sequence[str], tokenizer: Tokenizer, output: Path, options: PrepareOptions
) -> dict[Path, Manifest] | None:
    """Make this machine's shards, and the manifests of the corpora if they were the last. None: other machines are
    still at work."""
    return prepare_files(find_inputs(inputs, report=_warn), tokenizer, output, options)


def prepare_files(
    files: list[InputFile],
    tokenizer: Tokenizer,
    output: Path,
    options: PrepareOptions,
    arrivals: Arrivals | None = None,
) -> dict[Path, Manifest] | None:
    """The same, of files already found, or that are still to arrive: the corpus is the same."""
    job = Job(Work(files, tokenizer, output, options), arrivals)
    try:
        if arrivals is not None:
            job.claim()
            job.start_arrivals(arrivals)
        with job.crew:  # the workers load while the directory is claimed
            if arrivals is None:
                job.claim()
            job.make_shards()
        return finish(job.work)
    except OSError as error:
        raise cannot_write(output, error.strerror or str(error)) from None
    finally:
        job.release()


def _warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


class Arrivals(Protocol):
    """Inputs that arrive while they are prepared. Groups are waited for in their order, and released in any."""

    def start(self, files: list[InputFile]) -> None:
        """These have to come: of the others an earlier attempt has made all parts."""

    def wait(self, group: list[InputFile]) -> None:
        """Until all these files are there."""

    def release(self, group: list[InputFile]) -> None:
        """All parts of these files are made."""


class Job:
    """This machine's share of the work: its shards."""

    def __init__(self, work: Work, arrivals: Arrivals | None = None) -> None:
        self.work, self.arrivals = work, arrivals
        self.crew = Crew(work)
        self.ends: dict[int, int] = {}  # group -> a block found to be past its end
        self.made: set[int] = set()  # groups whose parts an earlier attempt has made, where inputs have to arrive
        self.under_way: Counter[int] = Counter()  # group -> parts handed out and not finished
        self._locks: int | None = None
        self._done_elsewhere = False

    def claim(self) -> None:
        """Take the output directory: a new one, or one where the same job was left unfinished."""
        work, plan = self.work, self.work.parts / "plan"
        require_no_texts(work.output, ours=QUARANTINE_FILE)
        if work.is_done() or plan.exists():
            self._settle(plan)
        work.parts.mkdir(parents=True, exist_ok=True)
        if not create_file(plan, work.plan.content()):
            self._settle(plan)  # another machine has just begun: its inputs have to be the same
        self._locks = lock_shards(work.parts / "locks", work.dealt, _warn)
        if not is_there(self._locks, work.parts / "locks"):  # who had them has cleared the parts away
            self.release()
            self._done_elsewhere = work.is_done()
            if not self._done_elsewhere:
                self.claim()
            return
        clear_unfinished(work.parts, lambda part: work.shard_of(part) in work.dealt)
        name, content = work.tokenizer.stored()
        for corpus in work.corpora:
            corpus.mkdir(exist_ok=True)
            replace_file(corpus / name, content)

    def release(self) -> None:
        if self._locks is not None:
            os.close(self._locks)
            self._locks = None

    def start_arrivals(self, arrivals: Arrivals) -> None:
        """Have the inputs come that are still needed, and wait for the first, to prove an engine on."""
        if self._done_elsewhere:
            arrivals.start([])
            return
        self.made = {group for group in range(len(self.work.groups)) if self._is_made(group)}
        missing = [number for number in range(len(self.work.groups)) if number not in self.made]
        arrivals.start([file for number in missing for file in self.work.groups[number]])
        self.crew.sampled = [self._group(number) for number in missing[:1]]

    def make_shards(self) -> None:
        """Make this machine's parts, and join those of each shard as they are finished."""
        joiners = {} if self._done_elsewhere else {shard: self._joiner(shard) for shard in self._my_shards()}
        tasks = self._tasks(joiners)
        try:
            with ProgressBar("prepare", self.crew.input_bytes, "B") as progress:
                for name, facts in self.crew.run(tasks) if joiners else ():
                    if facts.past_end:
                        self.ends[name.group] = min(name.block, self.ends.get(name.group, name.block))
                    joiners[self.work.shard_of(name)].add(name, facts)
                    self._finished_part(name.group)
                    progress.advance(facts.input_bytes)
            for joiner in joiners.values():
                joiner.finish()
        finally:
            for joiner in joiners.values():
                joiner.close()

    def _my_shards(self) -> Iterator[int]:
        """Less the ones an earlier attempt has finished."""
        for shard in self.work.dealt:
            if not books_of(self.work.parts, shard).exists():
                yield shard

    def _joiner(self, shard: int) -> Joiner:
        seed = self.work.options.shuffle_seed
        key = None if seed is None else derive_seed(seed, "shuffle", shard)
        return Joiner(self.work.parts, self.work.corpora, shard, self.work.dtype, shuffle_key=key)

    def _tasks(self, joiners: dict[int, Joiner]) -> Iterator[Task]:
        """The parts of some shards and their inputs, in order. How many blocks a compressed file or a table has shows only when one is
        past its end."""
        for group in range(len(self.work.groups)):
            self.under_way[group] = 1  # for this loop, which may hand out more
            files = self._group(group)
            for block in itertools.count():
                name = PartName(group, block)
                if block >= self.ends.get(group, block + 1) or self.work.is_beyond(name):
                    break
                joiner = joiners.get(self.work.shard_of(name))
                if joiner is not None:
                    joiner.expect(name)
                    self.under_way[group] += 1
                    yield name, files
            self._finished_part(group)

    def _group(self, number: int) -> list[InputFile]:
        """The files of a group as they are read. One that had to arrive has a fingerprint of its own on this disk."""
        group = self.work.groups[number]
        if self.arrivals is None or number in self.made:
            return group
        self.arrivals.wait(group)
        here = [fingerprint_now(file) for file in group]
        for file, arrived in zip(group, here, strict=True):
            require_same(replace(file, version=""), arrived)
        return here

    def _finished_part(self, group: int) -> None:
        self.under_way[group] -= 1
        if self.arrivals is not None and not self.under_way[group]:
            self.arrivals.release(self.work.groups[group])

    def _is_made(self, group: int) -> bool:
        """Whether an earlier attempt has made all parts of a group; then it is known where the group ends."""
        name = PartName(group, 0)
        while not self.work.is_beyond(name):
            facts = read_facts(self.work.parts, name)
            if facts is not None and facts.past_end:
                self.ends[group] = name.block
                break
            books = books_of(self.work.parts, self.work.shard_of(name))
            joined = (self.work.parts / f"{name}.json").exists() and books.exists()
            if facts is None and not joined:
                return False
            name = PartName(group, name.block + 1)
        return True

    def _settle(self, plan: Path) -> None:
        """Go on with the parts of the same job, or clear away what `--overwrite` may replace."""
        work = self.work
        if work.is_done():  # a kill between the manifest and the end of the job leaves the parts
            shutil.rmtree(work.parts, ignore_errors=True)
            refusal: ArgosyError | None = ArgosyError(
                "data.output-exists",
                f"{work.output} already holds a prepared corpus",
                key="--output",
                value=str(work.output),
                fix="choose another directory, or pass --overwrite to replace it",
            )
        else:
            refusal = work.plan.difference(plan.read_bytes(), work.output)
        if refusal is None:
            return  # go on where the last attempt stopped
        if not work.options.overwrite:
            raise refusal
        for directory in {work.output, *work.corpora}:
            (directory / FILE_NAME).unlink(missing_ok=True)  # from here until the end the directory is not a corpus
            (directory / QUARANTINE_FILE).unlink(missing_ok=True)
            for old in directory.glob("shard-*.*"):
                old.unlink()
        shutil.rmtree(work.parts, ignore_errors=True)

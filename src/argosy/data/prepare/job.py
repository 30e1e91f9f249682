"""`argosy data prepare`: tokenize text into a corpus directory, in one streaming pass over many processes and machines.

    DIR/shard-00000.bin, .idx …  the tokens, in Megatron's format
    DIR/shard-00000.blocks …     checksums of their blocks
    DIR/tokenizer.json           the tokenizer
    DIR/quarantine.jsonl         records that could not be used, with file and offset
    DIR/manifest.json            written last: counts, hashes, fingerprint
    DIR/.plan                    if several machines made it: hashes of their plan and manifest, by which one that comes late knows its job

With several keys, each key has such a directory DIR/KEY, and document n of every key comes from the same record. Inputs are
split into blocks, each block becomes a part (`argosy.data.prepare.parts`), and the parts of a shard are joined. The shard of a
block depends on the inputs alone, so the bytes do not depend on the number of processes, machines or restarts. The number of
input records must equal documents plus quarantined records; the sum is checked.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from argosy.config.seeds import derive_seed
from argosy.console.progress_bar import ProgressBar
from argosy.data.chat.chat_template import TEMPLATE_FILE
from argosy.data.corpus.corpus_manifest import Manifest
from argosy.data.prepare.claim import OutputClaim
from argosy.data.prepare.finish import finish, read_manifests
from argosy.data.prepare.join import Joiner, shard_facts_path
from argosy.data.prepare.part_runner import PartRunner
from argosy.data.prepare.parts import PartName, read_facts
from argosy.data.prepare.resuming import cannot_write, resumed
from argosy.data.prepare.touched_inputs import check_since_listed, must_start_over
from argosy.data.prepare.work import QUARANTINE_FILE, PrepareOptions, Work
from argosy.data.prepare.workers import Task
from argosy.data.text.input_files import fingerprint_now, require_same
from argosy.data.text.inputs import InputFile, find_inputs, require_no_texts
from argosy.data.text.tokenizer import Tokenizer
from argosy.files import replace_file

_log = logging.getLogger(__name__)


def prepare(
    inputs: Sequence[str], tokenizer: Tokenizer, output: Path, options: PrepareOptions
) -> dict[Path, Manifest] | None:
    """Make this machine's shards. The last machine to finish also writes the manifests.

    Args:
        inputs: Files, directories, globs or URLs.
        tokenizer: The tokenizer.
        output: The corpus directory.
        options: The options.

    Returns:
        The manifest of each corpus, or None if other machines are still at work.
    """
    return prepare_files(find_inputs(inputs, report=_log.info, as_text=options.as_text), tokenizer, output, options)


def prepare_files(
    files: list[InputFile],
    tokenizer: Tokenizer,
    output: Path,
    options: PrepareOptions,
    arrivals: Arrivals | None = None,
) -> dict[Path, Manifest] | None:
    """Prepare listed files, which may still be arriving. The corpus is the same as that of `prepare`."""
    if arrivals is not None:
        # Files that have arrived may be deleted already, so only a new command goes on.
        return _prepare_files(files, tokenizer, output, options, arrivals)
    return resumed(lambda: _prepare_files(files, tokenizer, output, options, None))


def _prepare_files(
    files: list[InputFile], tokenizer: Tokenizer, output: Path, options: PrepareOptions, arrivals: Arrivals | None
) -> dict[Path, Manifest] | None:
    job = PrepareJob(Work(files, tokenizer, output, options), arrivals)
    # A late machine starts neither workers nor downloads.
    if job.is_finished():
        return read_manifests(job.work)
    try:
        if arrivals is not None:
            job.claim()
            job.start_arrivals(arrivals)
        # The workers load while this process claims the directory.
        with job.runner:
            if arrivals is None:
                job.claim()
                job.check_parts()
            job.make_shards()
            check_since_listed(job.work, job.runner)
        return finish(job.work)
    except OSError as error:
        raise cannot_write(output, error) from None
    finally:
        job.release()


class Arrivals(Protocol):
    """The interface of inputs that are downloaded while they are prepared. Groups are waited for in order, and released in any."""

    def start(self, files: list[InputFile]) -> None:
        """Start downloading these files. All parts of the other files exist from an earlier attempt."""

    def wait(self, group: list[InputFile]) -> None:
        """Block until all these files are complete."""

    def release(self, group: list[InputFile]) -> None:
        """Allow these files to be deleted, because all their parts are finished."""


class PrepareJob:
    """The work of this machine: its shards."""

    def __init__(self, work: Work, arrivals: Arrivals | None = None) -> None:
        self.work, self.arrivals = work, arrivals
        self.runner = PartRunner(work)
        # group -> a block known to be past its end
        self.ends: dict[int, int] = {}
        # Groups whose parts all exist from an earlier attempt. Used only if inputs have to arrive.
        self.made: set[int] = set()
        # group -> number of unfinished tasks
        self.pending: Counter[int] = Counter()
        self._claim = OutputClaim(work, work.own_shards)
        self._done_elsewhere = False

    def claim(self) -> None:
        """Lock the output directory: a new one, or one with an unfinished attempt of the same job."""
        work = self.work
        require_no_texts(work.output, ours=QUARANTINE_FILE)
        self._done_elsewhere = not self._claim.take()
        if self._done_elsewhere:
            return
        name, content = work.tokenizer.stored()
        for corpus in work.corpora:
            corpus.mkdir(exist_ok=True)
            replace_file(corpus / name, content)
            if work.options.chat is not None:
                replace_file(corpus / TEMPLATE_FILE, work.options.chat.template.encode())

    def check_parts(self) -> None:
        """Refuse inputs that an earlier attempt read with other content. With `overwrite`, start over."""
        if not self._done_elsewhere and must_start_over(self.work, self.runner):
            self._claim.clear()
            self.claim()

    def is_finished(self) -> bool:
        """Return True if the other machines have finished the corpus."""
        return self._claim.is_finished()

    def release(self) -> None:
        """Release the locks."""
        self._claim.release()

    def start_arrivals(self, arrivals: Arrivals) -> None:
        """Start the downloads that are still needed, and wait for the first input, from which the engine check is sampled."""
        if self._done_elsewhere:
            arrivals.start([])
            return
        self.made = {group for group in range(len(self.work.groups)) if self._is_made(group)}
        missing = [number for number in range(len(self.work.groups)) if number not in self.made]
        arrivals.start([file for number in missing for file in self.work.groups[number]])
        self.runner.sampled = [self._group(number) for number in missing[:1]]

    def make_shards(self) -> None:
        """Make this machine's parts, and join those of each shard as they are finished."""
        joiners = {} if self._done_elsewhere else {shard: self._joiner(shard) for shard in self._unfinished_shards()}
        tasks = self._tasks(joiners)
        try:
            with ProgressBar("prepare", self.runner.input_bytes, "B") as progress:
                for name, facts in self.runner.run(tasks) if joiners else ():
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

    def _unfinished_shards(self) -> Iterator[int]:
        """Yield this machine's shards, except those that an earlier attempt has finished."""
        for shard in self.work.own_shards:
            if not shard_facts_path(self.work.parts, shard).exists():
                yield shard

    def _joiner(self, shard: int) -> Joiner:
        seed = self.work.options.shuffle_seed
        key = None if seed is None else derive_seed(seed, "shuffle", shard)
        return Joiner(self.work.parts, self.work.corpora, shard, self.work.dtype, shuffle_key=key)

    def _tasks(self, joiners: dict[int, Joiner]) -> Iterator[Task]:
        """Yield the parts of these shards and their inputs, in order.

        The number of blocks of a compressed file or a table is known only after a read past its end.
        """
        for group in range(len(self.work.groups)):
            # One for this loop, which may add more tasks.
            self.pending[group] = 1
            files = self._group(group)
            for block in itertools.count():
                name = PartName(group, block)
                if block >= self.ends.get(group, block + 1) or self.work.is_beyond(name):
                    break
                joiner = joiners.get(self.work.shard_of(name))
                if joiner is not None:
                    joiner.expect(name)
                    self.pending[group] += 1
                    yield name, files
            self._finished_part(group)

    def _group(self, number: int) -> list[InputFile]:
        """Return the files of a group with the fingerprint to check them by. A downloaded file has its local fingerprint."""
        group = self.work.groups[number]
        if self.arrivals is None or number in self.made:
            return group
        self.arrivals.wait(group)
        here = [fingerprint_now(file) for file in group]
        for file, arrived in zip(group, here, strict=True):
            require_same(replace(file, version=""), arrived)
        return here

    def _finished_part(self, group: int) -> None:
        self.pending[group] -= 1
        if self.arrivals is not None and not self.pending[group]:
            self.arrivals.release(self.work.groups[group])

    def _is_made(self, group: int) -> bool:
        """Return True if an earlier attempt made all parts of a group. Then `ends` knows where the group ends."""
        name = PartName(group, 0)
        while not self.work.is_beyond(name):
            facts = read_facts(self.work.parts, name)
            if facts is not None and facts.past_end:
                self.ends[group] = name.block
                break
            shard_facts = shard_facts_path(self.work.parts, self.work.shard_of(name))
            joined = (self.work.parts / f"{name}.json").exists() and shard_facts.exists()
            if facts is None and not joined:
                return False
            name = PartName(group, name.block + 1)
        return True

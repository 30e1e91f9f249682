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

import hashlib
import itertools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import orjson

from argosy.config.seeds import derive_seed
from argosy.data.corpus.indexed import dtype_for
from argosy.data.corpus.manifest import (
    FILE_NAME,
    Manifest,
    Shard,
    Source,
    TokenizerFacts,
    read_manifest,
    write_manifest,
)
from argosy.data.prepare.crew import Crew
from argosy.data.prepare.join import Joiner, books_of, shard_name
from argosy.data.prepare.locks import is_there, lock_shards
from argosy.data.prepare.parts import PartFacts, PartName, PartOptions, cannot_write, clear_unfinished, read_facts
from argosy.data.text.inputs import InputFile, find_inputs, group_inputs, require_no_texts
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.record.files import replace_file
from argosy.record.progress import Progress

QUARANTINE_FILE = "quarantine.jsonl"
PARTS = ".parts"


@dataclass(frozen=True)
class PrepareOptions:
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    text_lines: bool = False  # a .txt file holds a document a line, rather than being one
    max_bad: float = 0.5  # share of records that may be quarantined
    overwrite: bool = False
    shards: int = 1
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    machine: int = 0  # this machine is number `machine` of `machines` that share the work
    machines: int = 1
    shuffle_seed: int | None = None  # put the documents of each shard in a random order

    def __post_init__(self) -> None:
        if self.machine >= self.machines:
            raise ArgosyError(
                "config.bad-value",
                f"{self.machines} machines are numbered from 0 to {self.machines - 1}",
                key="--shard-index",
                value=self.machine,
                fix=f"--shard-index {self.machines - 1} or less, or a larger --shard-count",
            )


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
    job = Job(files, tokenizer, output, options, arrivals)
    try:
        if arrivals is not None:
            job.claim()
            job.start_arrivals(arrivals)
        with job.crew:  # the workers load while the directory is claimed
            if arrivals is None:
                job.claim()
            job.make_shards()
        return job.finish()
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
    def __init__(
        self,
        files: list[InputFile],
        tokenizer: Tokenizer,
        output: Path,
        options: PrepareOptions,
        arrivals: Arrivals | None = None,
    ) -> None:
        _check_keys(options.keys, files)
        self.files, self.output, self.options, self.arrivals = files, output, options, arrivals
        self.corpora = corpora_of(output, options.keys)
        self.groups = group_inputs(files, options.text_lines)
        self.part_options = PartOptions(
            keys=options.keys,
            append_eod=options.append_eod,
            text_lines=options.text_lines,
            block_bytes=_block_bytes(files),
        )
        self.eod = (
            tokenizer.eod_id if options.append_eod else None
        )  # a tokenizer without one is refused before work starts
        self.tokenizer = tokenizer
        self.parts = output / PARTS
        self.crew = Crew(
            self.parts,
            self.groups,
            tokenizer,
            self.part_options,
            eod=self.eod,
            workers=options.workers,
            input_bytes=sum(file.size for file in files) / options.machines,
        )
        self.ends: dict[int, int] = {}  # group -> a block found to be past its end
        self.made: set[int] = set()  # groups whose parts an earlier attempt has made, where inputs have to arrive
        self.under_way: Counter[int] = Counter()  # group -> parts handed out and not finished
        self._locks: int | None = None
        self._done_elsewhere = False

    def claim(self) -> None:
        """Take the output directory: a new one, or one where the same job was left unfinished."""
        plan = self.parts / "plan"
        require_no_texts(self.output, ours=QUARANTINE_FILE)
        if self._is_corpus() or plan.exists():
            self._settle(plan)
        self.parts.mkdir(parents=True, exist_ok=True)
        replace_file(plan, self._fingerprint())
        self._locks = lock_shards(self.parts / "locks", self._dealt(), _warn)
        if not is_there(self._locks, self.parts / "locks"):  # who had them has cleared the parts away
            self.release()
            self._done_elsewhere = self._is_corpus()
            if not self._done_elsewhere:
                self.claim()
            return
        clear_unfinished(self.parts, lambda part: self.shard_of(part) in self._dealt())
        name, content = self.tokenizer.stored()
        for corpus in self.corpora:
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
        self.made = {group for group in range(len(self.groups)) if self._is_made(group)}
        missing = [group for number, group in enumerate(self.groups) if number not in self.made]
        arrivals.start([file for group in missing for file in group])
        self.crew.sampled = missing[:1]
        for group in missing[:1]:
            arrivals.wait(group)

    def make_shards(self) -> None:
        """Make this machine's parts, and join those of each shard as they are finished."""
        joiners = {} if self._done_elsewhere else {shard: self._joiner(shard) for shard in self._my_shards()}
        names = self._names(joiners)
        try:
            with Progress("prepare", self.crew.input_bytes, "B") as progress:
                for name, facts in self.crew.run(names) if joiners else ():
                    if facts.past_end:
                        self.ends[name.group] = min(name.block, self.ends.get(name.group, name.block))
                    joiners[self.shard_of(name)].add(name, facts)
                    self._finished_part(name.group)
                    progress.advance(facts.input_bytes)
            for joiner in joiners.values():
                joiner.finish()
        finally:
            for joiner in joiners.values():
                joiner.close()

    def _dealt(self) -> range:
        """The shards this machine makes."""
        return range(self.options.machine, self.options.shards, self.options.machines)

    def _my_shards(self) -> Iterator[int]:
        """Less the ones an earlier attempt has finished."""
        for shard in self._dealt():
            if not books_of(self.parts, shard).exists():
                yield shard

    def _joiner(self, shard: int) -> Joiner:
        seed = self.options.shuffle_seed
        key = None if seed is None else derive_seed(seed, "shuffle", shard)
        dtype = dtype_for(self.tokenizer.vocab_size)
        return Joiner(self.parts, self.corpora, shard, dtype, shuffle_key=key)

    def finish(self) -> dict[Path, Manifest] | None:
        """When every shard is there: the manifests. Any machine may be the last, or several at once; all would write the same."""
        paths = [books_of(self.parts, shard) for shard in range(self.options.shards)]
        try:
            documents = [orjson.loads(path.read_bytes()) for path in paths]
            quarantine = b"".join(path.with_suffix(".quarantine.jsonl").read_bytes() for path in paths)
        except FileNotFoundError:  # a shard is missing, or a machine that was last with us has cleared the parts away
            return {corpus: read_manifest(corpus) for corpus in self.corpora} if self._is_corpus() else None
        facts = [PartFacts(**part) for document in documents for part in document["parts"]]
        quarantined: Counter[str] = sum((Counter(f.quarantined) for f in facts), Counter())
        for corpus in self.corpora:
            replace_file(corpus / QUARANTINE_FILE, quarantine)
        self._check_bad(sum(f.documents for f in facts), quarantined)
        manifests = {}
        for key, corpus in enumerate(self.corpora):
            manifests[corpus] = Manifest(
                tokenizer=TokenizerFacts(
                    fingerprint=self.tokenizer.fingerprint,
                    vocab_size=self.tokenizer.vocab_size,
                    eod_id=self.eod,
                    file=self.tokenizer.stored()[0],
                ),
                append_eod=self.eod is not None,
                dtype=dtype_for(self.tokenizer.vocab_size).name,
                shards=[Shard(**document["shards"][key]) for document in documents],
                sources=self._sources(facts),
                quarantined=dict(sorted(quarantined.items())),
            )
            write_manifest(corpus, manifests[corpus])
        shutil.rmtree(self.parts, ignore_errors=True)
        return manifests

    def shard_of(self, name: PartName) -> int:
        """Blocks are dealt to shards in turn, each file starting with another one."""
        return (name.group + name.block) % self.options.shards

    def _names(self, joiners: dict[int, Joiner]) -> Iterator[PartName]:
        """The parts of some shards, in order. How many blocks a compressed file or a table has shows only when one is
        past its end."""
        for group in range(len(self.groups)):
            self.under_way[group] = 1  # for this loop, which may hand out more
            if self.arrivals is not None and group not in self.made:
                self.arrivals.wait(self.groups[group])
            for block in itertools.count():
                name = PartName(group, block)
                if block >= self.ends.get(group, block + 1) or self._beyond(name):
                    break
                joiner = joiners.get(self.shard_of(name))
                if joiner is not None:
                    joiner.expect(name)
                    self.under_way[group] += 1
                    yield name
            self._finished_part(group)

    def _finished_part(self, group: int) -> None:
        self.under_way[group] -= 1
        if self.arrivals is not None and not self.under_way[group]:
            self.arrivals.release(self.groups[group])

    def _is_made(self, group: int) -> bool:
        """Whether an earlier attempt has made all parts of a group; then it is known where the group ends."""
        name = PartName(group, 0)
        while not self._beyond(name):
            facts = read_facts(self.parts, name)
            if facts is not None and facts.past_end:
                self.ends[group] = name.block
                break
            joined = (self.parts / f"{name}.json").exists() and books_of(self.parts, self.shard_of(name)).exists()
            if facts is None and not joined:
                return False
            name = PartName(group, name.block + 1)
        return True

    def _beyond(self, name: PartName) -> bool:
        first = self.groups[name.group][0]
        if first.is_table or first.is_compressed:
            return False
        size = first.size if self.options.text_lines or not first.is_text else 1
        return name.block * self.part_options.block_bytes >= max(1, size)

    def _fingerprint(self) -> bytes:
        """Of all that decides the bytes of the corpus."""
        facts = [
            [(f.path, f.size) for f in self.files],
            self.tokenizer.fingerprint,
            self.eod,
            asdict(self.part_options),
        ]
        facts += [self.options.shards, self.options.shuffle_seed]
        return hashlib.sha256(repr(facts).encode()).hexdigest().encode()

    def _is_corpus(self) -> bool:
        """Whether there is a finished corpus: the manifest of the last key is written last."""
        return any((directory / FILE_NAME).exists() for directory in (self.output, self.corpora[-1]))

    def _settle(self, plan: Path) -> None:
        finished = self._is_corpus()
        if finished:  # a kill between the manifest and the end of the job leaves them
            shutil.rmtree(self.parts, ignore_errors=True)
        if not finished and plan.read_bytes() == self._fingerprint():
            return  # go on where the last attempt stopped
        if not self.options.overwrite:
            raise ArgosyError(
                "data.output-exists" if finished else "data.other-plan",
                f"{self.output} already holds a {'prepared corpus' if finished else 'half-made one with other inputs or options'}",
                key="--output",
                value=str(self.output),
                fix="choose another directory, or pass --overwrite to replace it",
            )
        for directory in {self.output, *self.corpora}:
            (directory / FILE_NAME).unlink(missing_ok=True)  # from here until the end the directory is not a corpus
            (directory / QUARANTINE_FILE).unlink(missing_ok=True)
            for old in directory.glob("shard-*.*"):
                old.unlink()
        shutil.rmtree(self.parts, ignore_errors=True)

    def _sources(self, facts: list[PartFacts]) -> list[Source]:
        documents: Counter[str] = Counter()
        bad: Counter[str] = Counter()
        for part in facts:
            for file, (good, faulty) in part.files.items():
                documents[file] += good
                bad[file] += faulty
        return [
            Source(path=f.path, bytes=f.size, documents=documents[f.path], quarantined=bad[f.path]) for f in self.files
        ]

    def _check_bad(self, good: int, quarantined: Counter[str]) -> None:
        bad, records = quarantined.total(), good + quarantined.total()
        if good and bad <= self.options.max_bad * records:
            return
        share = bad / max(1, records)
        what = (
            "no document could be used"
            if good == 0
            else f"{share:.2%} is more than --max-bad {self.options.max_bad:.2%}"
        )
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in quarantined.most_common())
        shutil.rmtree(self.parts, ignore_errors=True)
        for corpus in self.corpora:
            for shard in range(self.options.shards):
                for path in corpus.glob(f"{shard_name(shard)}.*"):
                    path.unlink()
        raise ArgosyError(
            "data.bad-records",
            f"{bad:,} of {records:,} records were quarantined ({kinds}): {what}"
            if records
            else "the inputs hold no record",
            fix=f"see {self.corpora[0] / QUARANTINE_FILE}; is --key {', '.join(self.options.keys)} right?",
        )


def corpora_of(output: Path, keys: Sequence[str]) -> list[Path]:
    """Where the corpus of each key goes: the directory itself for one key, else one named after the key inside it."""
    if len(keys) == 1:
        return [output]
    names = (quote(key, safe="") for key in keys)  # a key may hold a slash
    return [output / (f"%2E{name[1:]}" if name.startswith(".") else name) for name in names]


def _check_keys(keys: Sequence[str], files: Sequence[InputFile]) -> None:
    plain = next((file.path for file in files if file.is_text), None)
    if len(keys) > 1 and (plain is not None or len(set(keys)) < len(keys)):
        cause = f"{plain} is plain text, which has no keys" if plain is not None else "a key is named twice"
        raise ArgosyError(
            "config.bad-value",
            cause,
            key="--key",
            value=", ".join(keys),
            fix="name each key once, for records that have it",
        )


def _block_bytes(files: Sequence[InputFile]) -> int:
    """A 64th of the whole, as a power of two between 4 and 64 MiB: enough blocks to share, not too many files."""
    share = sum(file.size for file in files) // 64
    return min(64 << 20, max(4 << 20, 1 << (share - 1).bit_length() if share else 0))

"""`argosy data prepare`: from text to a corpus directory, in one streaming pass shared by processes and machines.

    DIR/shard-00000.bin, .idx …  the tokens, as Megatron reads them
    DIR/tokenizer.json           the tokenizer they were made with
    DIR/quarantine.jsonl         records that could not be used, with file and offset
    DIR/manifest.json            written last: counts, hashes, fingerprint

Inputs are cut into blocks, each block becomes a part (`argosy.data.parts`), and the parts of a shard are joined. Which
shard a block belongs to depends on the inputs alone, so the bytes do not depend on how many processes or machines
worked, nor on how often they were killed. Documents in equal documents out plus quarantined; the sum is checked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from argosy.config.seeds import derive_seed
from argosy.data.blocks import open_blocks
from argosy.data.engines import choose_engine
from argosy.data.indexed import IndexedReader, IndexedWriter, bin_path, dtype_for, idx_path
from argosy.data.inputs import InputFile, find_inputs
from argosy.data.manifest import FILE_NAME, Manifest, Shard, Source, TokenizerFacts, write_manifest
from argosy.data.order import permute
from argosy.data.parts import PartFacts, PartMaker, PartName, PartOptions
from argosy.data.records import Parser, texts_of
from argosy.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from argosy.data.workers import Pool
from argosy.errors import ArgosyError
from argosy.record.files import replace_file
from argosy.record.progress import Progress

QUARANTINE_FILE = "quarantine.jsonl"
PARTS = ".parts"
_INLINE_BYTES = 4 << 20  # less than this is not worth starting processes for
_PROOF_BYTES = 200_000  # of the corpus, to prove an engine on


@dataclass(frozen=True)
class PrepareOptions:
    key: str = "text"
    append_eod: bool = True
    text_lines: bool = False  # a .txt file holds a document a line, rather than being one
    max_bad: float = 0.5  # share of records that may be quarantined
    overwrite: bool = False
    shards: int = 1
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    machine: int = 0  # this machine is number `machine` of `machines` that share the work
    machines: int = 1
    shuffle_seed: int | None = None  # put the documents of each shard in a random order


def prepare(inputs: Sequence[str], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> Manifest | None:
    """Make this machine's shards, and the manifest if they were the last. None: other machines are still at work."""
    job = Job(find_inputs(inputs, report=_warn), tokenizer, output, options)
    try:
        job.claim()
        job.make_parts()
        for shard in job.my_shards():
            job.join(shard)
        return job.finish()
    except OSError as error:
        raise ArgosyError(
            "data.write-failed",
            f"{output}: {error.strerror or error}",
            fix="free some space or choose another --output, then run it again: finished parts are kept",
        ) from None


def _warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


class Job:
    def __init__(self, files: list[InputFile], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> None:
        self.files, self.output, self.options = files, output, options
        self.groups = group_inputs(files, options.text_lines)
        self.part_options = PartOptions(
            key=options.key,
            append_eod=options.append_eod,
            text_lines=options.text_lines,
            block_bytes=_block_bytes(files),
        )
        self.eod = (
            tokenizer.eod_id if options.append_eod else None
        )  # a tokenizer without one is refused before work starts
        self.tokenizer, self.engine = choose_engine(tokenizer, self._sample())
        self.parts = output / PARTS
        self.facts: dict[PartName, PartFacts] = {}

    def claim(self) -> None:
        """Take the output directory: a new one, or one where the same job was left unfinished."""
        plan = self.parts / "plan"
        if (self.output / FILE_NAME).exists() or plan.exists():
            self._settle(plan)
        self.parts.mkdir(parents=True, exist_ok=True)
        replace_file(plan, self._fingerprint())
        name, content = self.tokenizer.stored()
        replace_file(self.output / name, content)

    def make_parts(self) -> None:
        names = self._names()
        total = sum(file.size for file in self.files) / self.options.machines
        with Progress("prepare", total, "B") as progress:
            for name, facts in self._run(names, total):
                self.facts[name] = facts
                progress.advance(facts.input_bytes)

    def my_shards(self) -> Iterator[int]:
        return iter(range(self.options.machine, self.options.shards, self.options.machines))

    def join(self, shard: int) -> None:
        """The parts of a shard, in the order of their names, as one pair."""
        books = self.parts / f"shard-{shard:05d}.json"
        if books.exists():
            return
        names = [name for name in sorted(self.facts) if self.shard_of(name) == shard and not self.facts[name].past_end]
        readers = [IndexedReader(self.parts / str(name)) for name in names]
        writer = IndexedWriter(self.output / shard_name(shard), dtype_for(self.tokenizer.vocab_size))
        try:
            if self.options.shuffle_seed is None:
                for reader in readers:
                    writer.add_pair(reader)
            else:
                _add_shuffled(writer, readers, derive_seed(self.options.shuffle_seed, "shuffle", shard))
            written = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        for reader in readers:
            reader.close()
        facts = [self.facts[name] for name in names]
        if written.documents != sum(f.documents for f in facts) or any(
            f.records != f.documents + sum(f.quarantined.values()) for f in facts
        ):
            raise RuntimeError(f"documents were lost in shard {shard}: {written.documents} written of {facts}")
        quarantine = b"".join((self.parts / f"{name}.quarantine.jsonl").read_bytes() for name in names)
        replace_file(self.parts / f"shard-{shard:05d}.quarantine.jsonl", quarantine)
        document = {"shard": asdict(written) | {"name": shard_name(shard)}, "parts": [asdict(f) for f in facts]}
        replace_file(books, orjson.dumps(document))
        for name in names:  # the shard has it all
            for suffix in (".bin", ".idx", ".quarantine.jsonl"):
                (self.parts / f"{name}{suffix}").unlink(missing_ok=True)

    def finish(self) -> Manifest | None:
        """When every shard is there: the manifest. Any machine may be the last; all would write the same."""
        paths = [self.parts / f"shard-{shard:05d}.json" for shard in range(self.options.shards)]
        if not all(path.exists() for path in paths):
            return None
        documents = [orjson.loads(path.read_bytes()) for path in paths]
        facts = [PartFacts(**part) for document in documents for part in document["parts"]]
        quarantined: Counter[str] = sum((Counter(f.quarantined) for f in facts), Counter())
        quarantine = b"".join(path.with_suffix(".quarantine.jsonl").read_bytes() for path in paths)
        replace_file(self.output / QUARANTINE_FILE, quarantine)
        self._check_bad(sum(f.documents for f in facts), quarantined)
        manifest = Manifest(
            tokenizer=TokenizerFacts(
                fingerprint=self.tokenizer.fingerprint,
                vocab_size=self.tokenizer.vocab_size,
                eod_id=self.eod,
                file=self.tokenizer.stored()[0],
            ),
            append_eod=self.eod is not None,
            dtype=dtype_for(self.tokenizer.vocab_size).name,
            shards=[Shard(**document["shard"]) for document in documents],
            sources=self._sources(facts),
            quarantined=dict(sorted(quarantined.items())),
        )
        write_manifest(self.output, manifest)
        shutil.rmtree(self.parts, ignore_errors=True)
        return manifest

    def shard_of(self, name: PartName) -> int:
        """Blocks are dealt to shards in turn, each file starting with another one."""
        return (name.group + name.block) % self.options.shards

    def _names(self) -> Iterator[PartName]:
        """This machine's parts. How many blocks a compressed file or a table has shows only when one is past its end."""
        for group in range(len(self.groups)):
            block = 0
            while not any(f.past_end and n.block <= block for n, f in self.facts.items() if n.group == group):
                name = PartName(group, block)
                if self._beyond(name):
                    break
                if self.shard_of(name) % self.options.machines == self.options.machine:
                    yield name
                block += 1

    def _beyond(self, name: PartName) -> bool:
        first = self.groups[name.group][0]
        if first.is_table or first.is_compressed:
            return False
        size = first.size if self.options.text_lines or not first.is_text else 1
        return name.block * self.part_options.block_bytes >= max(1, size)

    def _run(self, names: Iterator[PartName], total: float) -> Iterator[tuple[PartName, PartFacts]]:
        if self.options.workers == 1 or total < _INLINE_BYTES:
            maker = PartMaker(self.parts, self.groups, self.tokenizer, self.part_options)
            for name in names:
                yield name, maker.make(name)
        else:
            with Pool(self.options.workers, self.parts, self.groups, self.tokenizer, self.part_options) as pool:
                yield from pool.run(names)

    def _sample(self) -> list[str]:
        """A little of the corpus, from the start of the first inputs, to prove an engine on."""
        texts: list[str] = []
        for group in self.groups[:3]:
            if sum(map(len, texts)) > _PROOF_BYTES:
                break
            pieces = open_blocks(
                group, block_bytes=1 << 16, lines=self.options.text_lines, column=self.options.key
            ).block(0)
            parser = Parser(None if group[0].is_text else self.options.key)
            texts.extend(text[:20_000] for text in texts_of(pieces or iter(()), parser))
        return texts[:200]

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

    def _settle(self, plan: Path) -> None:
        same = plan.exists() and plan.read_bytes() == self._fingerprint()
        if same and not (self.output / FILE_NAME).exists():
            return  # go on where the last attempt stopped
        if not self.options.overwrite:
            finished = (self.output / FILE_NAME).exists()
            raise ArgosyError(
                "data.output-exists" if finished else "data.other-plan",
                f"{self.output} already holds a {'prepared corpus' if finished else 'half-made one with other inputs or options'}",
                key="--output",
                value=str(self.output),
                fix="choose another directory, or pass --overwrite to replace it",
            )
        (self.output / FILE_NAME).unlink(missing_ok=True)  # from here until the end the directory is not a corpus
        (self.output / QUARANTINE_FILE).unlink(missing_ok=True)
        for old in self.output.glob("shard-*.*"):
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
        for shard in range(self.options.shards):
            for path in (bin_path(self.output / shard_name(shard)), idx_path(self.output / shard_name(shard))):
                path.unlink(missing_ok=True)
        raise ArgosyError(
            "data.bad-records",
            f"{bad:,} of {records:,} records were quarantined ({kinds or 'none'}): {what}",
            fix=f"see {self.output / QUARANTINE_FILE}; is --key {self.options.key!r} right?",
        )


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}"


def group_inputs(files: Sequence[InputFile], text_lines: bool) -> list[list[InputFile]]:
    """Each file alone, but for text files that are one document each: those are taken together up to a block's size."""
    groups: list[list[InputFile]] = []
    room = 0
    for file in files:
        together = file.is_text and not text_lines
        if together and groups and room >= file.size and groups[-1][0].is_text:
            groups[-1].append(file)
            room -= file.size
        else:
            groups.append([file])
            room = (8 << 20) - file.size if together else 0
    return groups


def _block_bytes(files: Sequence[InputFile]) -> int:
    """A 64th of the whole, as a power of two between 4 and 64 MiB: enough blocks to share, not too many files."""
    share = sum(file.size for file in files) // 64
    return min(64 << 20, max(4 << 20, 1 << (share - 1).bit_length() if share else 0))


def _add_shuffled(writer: IndexedWriter, readers: list[IndexedReader], key: int) -> None:
    import numpy as np

    starts = np.cumsum([0, *(reader.documents for reader in readers)])
    order = permute(np.arange(starts[-1]), int(starts[-1]), key) if starts[-1] else np.zeros(0, np.int64)
    for document in order:
        which = int(np.searchsorted(starts, document, side="right")) - 1
        reader, within = readers[which], int(document - starts[which])
        first, last = (int(reader.document_indices[within + i]) for i in (0, 1))
        start, end = reader.token_at_document(within), reader.token_at_document(within + 1)
        writer.add_many(reader.read(start, end - start), reader.lengths[first:last], np.array([last - first]))


def preview(inputs: Sequence[str], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> str:
    """What `prepare` would do, having checked what can be checked without reading the text."""
    job = Job(find_inputs(inputs), tokenizer, output, options)
    eod = "no end-of-document token" if job.eod is None else f"id {job.eod} ends each document"
    lines = [f"{file.path}  {file.size:,} bytes" for file in job.files]
    total = sum(file.size for file in job.files)
    dtype = dtype_for(tokenizer.vocab_size).name
    lines.append(f"{len(job.files)} files, {total:,} bytes -> {output} ({options.shards} shards, {dtype} tokens)")
    lines.append(f"tokenizer {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size:,} entries, {eod}")
    lines.append(f"engine    {job.engine}")
    return "\n".join(lines)


def describe(manifest: Manifest, output: Path) -> str:
    """The books of a finished corpus in a few lines."""
    bad = sum(manifest.quarantined.values())
    seen = manifest.documents + bad
    shards = f", {len(manifest.shards)} shards" if len(manifest.shards) > 1 else ""
    lines = [f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype}{shards})"]
    lines.append(f"documents: {seen:,} in = {manifest.documents:,} out + {bad:,} quarantined")
    if bad:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in manifest.quarantined.items())
        lines.append(f"quarantined: {kinds}; see {output / QUARANTINE_FILE}")
    return "\n".join(lines)


def parse_share(text: str) -> float:
    """`0.1%` or `0.001`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgosyError(
            "config.bad-value", "not a share between 0 and 1", key="--max-bad", value=text, fix="write 0.1% or 0.001"
        )
    return share


def train_tokenizer_on(inputs: Sequence[str], vocab_size: int, output: Path, key: str) -> str:
    """Train a BPE on the good documents of the inputs; a line that says what came out."""

    def texts() -> Iterator[str]:
        for group in group_inputs(find_inputs(inputs), text_lines=False):
            blocks = open_blocks(group, block_bytes=1 << 24, lines=False, column=key)
            parser = Parser(None if group[0].is_text else key)
            index = 0
            while (pieces := blocks.block(index)) is not None:
                yield from texts_of(pieces, parser)
                index += 1

    trained = train_bpe(texts(), vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, trained.encode())
    tokenizer = load_tokenizer(str(output))
    return f"{output}: {tokenizer.vocab_size:,} entries, fingerprint {tokenizer.fingerprint[:12]}"

"""`argosy data convert`: convert MDS data sets to `.bin/.idx`, and back.

One MDS sample is one document. With a tokenizer the result is a corpus with a manifest, and every id is checked against the
vocabulary; without one it is a bare pair. When converting to MDS, a sample is a whole document or, as llm-foundry trains on,
`seq_len` tokens. Data that a format cannot hold is counted and reported, never dropped silently. Both directions stream: one
shard or one document is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from argosy.console.progress_bar import ProgressBar
from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.corpus_manifest import FILE_NAME, Manifest, Shard, Source, TokenizerFacts, write_manifest
from argosy.data.corpus.indexed import CODES, IndexedWriter, Tokens, Written, bin_path, dtype_for, idx_path
from argosy.data.corpus.lengths import Integers, document_lengths
from argosy.data.corpus.mds import SIZE_LIMIT, MdsReader, MdsWriter, array_dtype
from argosy.data.corpus.mds_files import INDEX
from argosy.data.corpus.pairs import open_pairs
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.errors import ArgosyError
from argosy.files import replace_file

# The dtype of ids in a `bytes` column that llm-foundry writes, and its default when reading.
_FOUNDRY = "int64"
# The encodings of a token column that can be written.
ENCODINGS = ("ndarray:uint16", "ndarray:int32", "bytes")
_SHARD = "shard-00000"
_BATCH_TOKENS = 1 << 20
_MDS_SHARD = re.compile(r"shard\.\d{5}\.mds(\.\w+)?")


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `argosy data convert`."""

    column: str = "tokens"
    # The dtype of ids in a `bytes` column. None: int64, as in llm-foundry.
    bytes_dtype: str | None = None
    tokenizer: str | None = None
    eod: str | None = None
    # The encoding of the MDS column. None: an ndarray of the corpus's own dtype.
    encoding: str | None = None
    # `zstd` or `zstd:LEVEL`.
    compression: str | None = None
    seq_len: int | None = None
    size_limit: int = SIZE_LIMIT
    overwrite: bool = False


@dataclass(frozen=True)
class Converted:
    """The result of `convert`."""

    input: str
    output: str
    # "mds", "corpus" or "pair".
    kind: str
    # The encoding of an MDS column (ndarray:uint16, bytes, …), or the dtype of a .bin.
    stored_as: str
    # MDS samples, or documents of a corpus.
    documents: int
    tokens: int
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def describe(self) -> str:
        unit = "samples" if self.kind == "mds" else "documents"
        first = f"{self.input} -> {self.output}: {self.kind} of {self.documents:,} {unit}, {self.tokens:,} tokens ({self.stored_as})"
        return "\n".join([first, *(f"note: {note}" for note in self.notes)])


def convert(source: Path, output: Path, options: ConvertOptions, *, dry_run: bool = False) -> Converted:
    """Convert `source` to `output`. A directory with index.json is converted from MDS, anything else to MDS."""
    from_mds = (source / INDEX).exists()
    _check_direction(options, from_mds)
    try:
        if from_mds:
            return _FromMds(source, output, options).run(dry_run)
        return _ToMds(source, output, options).run(dry_run)
    except OSError as error:
        raise ArgosyError(
            "data.write-failed",
            f"{output}: {error.strerror or error}",
            fix="free some space, or choose another --output",
        ) from None


def _check_direction(options: ConvertOptions, from_mds: bool) -> None:
    """Refuse options of the other direction, which would have no effect."""
    unused = ("encoding", "compression", "seq_len") if from_mds else ("tokenizer", "eod")
    for name in unused:
        value = getattr(options, name)
        if value is not None:
            here, there = ("from", "to") if from_mds else ("to", "from")
            raise ArgosyError(
                "config.conflict",
                f"this converts {here} MDS, where the option has no effect: it is for converting {there} MDS",
                key=f"--{name.replace('_', '-')}",
                value=value,
                fix="leave it out; a directory with index.json is taken for MDS",
            )


class _FromMds:
    def __init__(self, source: Path, output: Path, options: ConvertOptions) -> None:
        self.source, self.output, self.options = source, output, options
        self.bytes_dtype = options.bytes_dtype or _FOUNDRY
        self.tokenizer = load_tokenizer(options.tokenizer, options.eod) if options.tokenizer else None
        self.reader = MdsReader(
            source,
            column=options.column,
            bytes_dtype=self.bytes_dtype,
            vocab_size=self.tokenizer.vocab_size if self.tokenizer else None,
        )
        if options.bytes_dtype is not None and self.reader.encoding != "bytes":
            raise _unused_bytes_dtype(
                options.bytes_dtype, f"column {options.column!r} is stored as {self.reader.encoding}"
            )
        if self.tokenizer is None and output.suffix in (".bin", ".idx"):
            self.output = output.with_suffix("")
        self.prefix = self.output / _SHARD if self.tokenizer else self.output
        self.dtype = dtype_for(self.tokenizer.vocab_size) if self.tokenizer else self._own_dtype()
        self.eod = _eod_of(self.tokenizer)

    def run(self, dry_run: bool) -> Converted:
        made = [self.output / FILE_NAME] if self.tokenizer else [bin_path(self.output), idx_path(self.output)]
        if any(file.exists() for file in made) and not self.options.overwrite:
            raise _output_exists(self.output)
        if dry_run:
            # Read the first shard, which checks the dtype of its ids.
            next(self.reader.documents(), None)
            return self._result(self.reader.samples, 0, ["the tokens are counted when they are read"])
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        (self.output / FILE_NAME).unlink(missing_ok=True)
        written, all_end = self._write()
        if self.tokenizer is not None:
            self._write_manifest(self.tokenizer, written, all_end)
        return self._result(written.documents, written.tokens, [])

    def _write(self) -> tuple[Written, bool]:
        """Write the pair. Return its counts, and True if every document ends with the end-of-document id."""
        writer = IndexedWriter(self.prefix, self.dtype, blocks=self.tokenizer is not None)
        all_end = True
        done = 0
        try:
            with ProgressBar("convert", self.reader.bytes, "B") as progress:
                for batch in _batches(self.reader.documents(progress.advance)):
                    flat = np.concatenate(batch)
                    lengths = np.array([len(tokens) for tokens in batch], np.int64)
                    self._check(flat, lengths, done)
                    ends = flat[np.cumsum(lengths)[lengths > 0] - 1]
                    all_end = all_end and len(ends) == len(batch) and bool((ends == self.eod).all())
                    # A sample without tokens becomes a document without sequences.
                    writer.add_many(flat.astype(self.dtype), lengths[lengths > 0], (lengths > 0).astype(np.int64))
                    done += len(batch)
            return writer.finish(), all_end
        except BaseException:
            writer.abandon()
            raise

    def _write_manifest(self, tokenizer: Tokenizer, written: Written, all_end: bool) -> None:
        name, content = tokenizer.stored()
        replace_file(self.output / name, content, sync=True)
        facts = TokenizerFacts(
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod_id=self.eod if all_end else None,
            file=name,
        )
        source = Source(path=str(self.source), bytes=self.reader.bytes, documents=written.documents, quarantined=0)
        manifest = Manifest(
            tokenizer=facts,
            append_eod=all_end,
            dtype=self.dtype.name,
            shards=[Shard(name=_SHARD, **asdict(written))],
            sources=[source],
            quarantined={},
        )
        write_manifest(self.output, manifest)

    def _result(self, documents: int, tokens: int, notes: list[str]) -> Converted:
        kind = "corpus" if self.tokenizer else "pair"
        return Converted(str(self.source), str(self.output), kind, self.dtype.name, documents, tokens, notes)

    def _own_dtype(self) -> np.dtype[Any]:
        """Return the dtype of the column if a `.bin` supports it and it has at most 32 bits, else int32."""
        found, _ = array_dtype(self.source, self.options.column, self.reader.encoding, self.bytes_dtype)
        return found if found is not None and found in CODES and found.itemsize <= 4 else np.dtype("<i4")

    def _check(self, flat: Tokens, lengths: Integers, first: int) -> None:
        """Refuse ids that the output cannot hold. Most columns read as the wrong dtype are refused earlier, in `mds_types`."""
        limit = self.tokenizer.vocab_size if self.tokenizer else int(np.iinfo(self.dtype).max) + 1
        if len(flat) and (int(flat.min()) < 0 or int(flat.max()) >= limit):
            at = int(np.argmax((flat < 0) | (flat >= limit)))
            number = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            hint = f"; is it really {self.bytes_dtype}? see --bytes-dtype" if self.reader.encoding == "bytes" else ""
            raise ArgosyError(
                "tokenizer.vocabulary",
                f"{self.source}: sample {first + number:,} holds the id {int(flat[at]):,}, outside 0 to {limit - 1:,}",
                key="--tokenizer",
                value=self.options.tokenizer,
                fix=f"give the tokenizer the data was made with{hint}",
            )


def _batches(documents: Iterator[Tokens]) -> Iterator[list[Tokens]]:
    """Group documents of one dtype into batches, because a numpy call per short document would be slow."""
    batch: list[Tokens] = []
    size = 0
    for tokens in documents:
        if batch and (size > _BATCH_TOKENS or tokens.dtype != batch[0].dtype):
            yield batch
            batch, size = [], 0
        batch.append(tokens)
        size += len(tokens)
    if batch:
        yield batch


class _ToMds:
    def __init__(self, source: Path, output: Path, options: ConvertOptions) -> None:
        self.source, self.output, self.options = source, output, options
        self.level = parse_compression(options.compression)

    def run(self, dry_run: bool) -> Converted:
        corpus = open_pairs(self.source)
        try:
            return self._run(corpus, dry_run)
        finally:
            for shard in corpus.shards:
                shard.close()

    def _run(self, corpus: Corpus, dry_run: bool) -> Converted:
        encoding = self._encoding(corpus)
        if (self.output / INDEX).exists() and not self.options.overwrite:
            raise _output_exists(self.output)
        samples, tokens, notes = self._count(corpus)
        if not dry_run:
            self._claim()
            writer = MdsWriter(
                self.output,
                encoding=encoding,
                column=self.options.column,
                bytes_dtype=self.options.bytes_dtype or _FOUNDRY,
                zstd_level=self.level,
                size_limit=self.options.size_limit,
            )
            with ProgressBar("convert", tokens, "tokens") as progress:
                for sample in self._samples(corpus):
                    writer.add(sample)
                    progress.advance(len(sample))
            writer.finish()
        return Converted(str(self.source), str(self.output), "mds", encoding, samples, tokens, notes)

    def _claim(self) -> None:
        """Remove the index and the shards of an earlier data set, so that old shards are never read among new ones."""
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / INDEX).unlink(missing_ok=True)
        for file in self.output.iterdir():
            if _MDS_SHARD.fullmatch(file.name):
                file.unlink()

    def _encoding(self, corpus: Corpus) -> str:
        dtypes = {shard.dtype for shard in corpus.shards}
        widest = "uint16" if dtypes <= {np.dtype("<u2"), np.dtype("u1")} else "int32"
        encoding = self.options.encoding or f"ndarray:{widest}"
        if encoding not in ENCODINGS or (encoding == "ndarray:uint16" and widest != "uint16"):
            raise ArgosyError(
                "config.bad-value",
                f"a token column is one of {', '.join(ENCODINGS)}, and must hold the corpus's {corpus.shards[0].dtype.name}",
                key="--encoding",
                value=encoding,
                fix=f"leave it out for ndarray:{widest}",
            )
        if any(dtype.kind == "f" or dtype.itemsize > 4 for dtype in dtypes):
            raise ArgosyError(
                "data.bad-index", f"{corpus.path} does not hold token ids of at most 32 bits", fix="prepare it again"
            )
        self._check_bytes_dtype(corpus, encoding)
        return encoding

    def _check_bytes_dtype(self, corpus: Corpus, encoding: str) -> None:
        dtype = self.options.bytes_dtype
        if dtype is None:
            return
        if encoding != "bytes":
            raise _unused_bytes_dtype(dtype, f"the column is to be {encoding}")
        if (largest := corpus.max_token()) > np.iinfo(dtype).max:
            raise ArgosyError(
                "config.bad-value",
                f"{corpus.path} holds the id {largest:,}, {dtype} ends at {np.iinfo(dtype).max:,}",
                key="--bytes-dtype",
                value=dtype,
                fix="int32 or int64",
            )

    def _count(self, corpus: Corpus) -> tuple[int, int, list[str]]:
        """Return (samples, tokens, notes) of the result, from the index alone."""
        if self.options.seq_len is not None:
            samples, rest = divmod(corpus.tokens, self.options.seq_len)
            notes = [f"the last {rest:,} tokens do not fill a sample and are left out"] if rest else []
            return samples, samples * self.options.seq_len, notes
        filled = sum(int(np.count_nonzero(lengths)) for s in corpus.shards for _, lengths in document_lengths(s))
        notes = []
        if filled < corpus.documents:
            notes.append(
                f"{corpus.documents - filled:,} documents without tokens are left out: MDS has no empty arrays"
            )
        sequences = sum(shard.sequences for shard in corpus.shards)
        if sequences > filled:
            notes.append(f"the bounds of {sequences:,} sequences within documents are not kept")
        return filled, corpus.tokens, notes

    def _samples(self, corpus: Corpus) -> Iterator[Tokens]:
        length = self.options.seq_len
        if length is not None:
            for start in range(0, corpus.tokens - length + 1, length):
                yield corpus.read(start, length)
            return
        for shard in corpus.shards:
            at = 0
            for _, lengths in document_lengths(shard):
                for tokens in lengths[lengths > 0].tolist():
                    yield shard.read(at, tokens)
                    at += tokens


def parse_compression(text: str | None) -> int | None:
    """Return the level of `zstd` (3, as in MosaicML) or `zstd:LEVEL`, or None for no compression."""
    if text is None:
        return None
    kind, _, level = text.partition(":")
    if kind == "zstd" and (not level or (level.isdigit() and 1 <= int(level) <= 22)):
        return int(level or 3)
    raise ArgosyError(
        "config.bad-value",
        "MDS is written plain or as zstd with a level from 1 to 22",
        key="--compression",
        value=text,
        fix="write zstd or zstd:7",
    )


def _unused_bytes_dtype(dtype: str, why: str) -> ArgosyError:
    return ArgosyError(
        "config.conflict",
        f"it is the type of ids in a column of plain bytes, and {why}",
        key="--bytes-dtype",
        value=dtype,
        fix="leave it out, or write such a column with --encoding bytes",
    )


def _eod_of(tokenizer: Tokenizer | None) -> int | None:
    """Return the end-of-document id, or None if the tokenizer has none. Nothing is appended here, so none is needed."""
    try:
        return None if tokenizer is None else tokenizer.eod_id
    except ArgosyError as error:
        if error.code != "tokenizer.no-eod":
            raise
        return None


def _output_exists(output: Path) -> ArgosyError:
    return ArgosyError(
        "data.output-exists",
        f"{output} already holds data",
        key="--output",
        value=str(output),
        fix="choose another name, or pass --overwrite to replace it",
    )

"""`argosy data prepare`: from text files to a corpus directory, in one streaming pass.

    DIR/shard-00000.bin, .idx   the tokens, as Megatron reads them
    DIR/tokenizer.json          the tokenizer they were made with
    DIR/quarantine.jsonl        records that could not be used, with file and offset
    DIR/manifest.json           written last: counts, hashes, fingerprint

Documents in always equal documents out plus quarantined; the sum is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from argosy.data.documents import BadRecord, TextUnit, find_inputs, read_documents
from argosy.data.indexed import IndexedWriter, Written, dtype_for
from argosy.data.manifest import FILE_NAME, Manifest, Shard, Source, TokenizerFacts, write_manifest
from argosy.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from argosy.errors import ArgosyError
from argosy.record.jsonl import JsonlWriter
from argosy.record.progress import Progress

SHARD = "shard-00000"
TOKENIZER_FILE = "tokenizer.json"
QUARANTINE_FILE = "quarantine.jsonl"
_BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class PrepareOptions:
    key: str = "text"
    append_eod: bool = True
    text_unit: TextUnit = "file"
    max_bad: float = 1.0  # share of records that may be quarantined
    overwrite: bool = False


def prepare(inputs: Sequence[Path], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> Manifest:
    files = find_inputs(inputs)
    eod = tokenizer.eod_id if options.append_eod else None
    _claim(output, options.overwrite)
    run = _Run(tokenizer, eod, output, options)
    try:
        with Progress("prepare", sum(file.stat().st_size for file in files), "B") as progress:
            for file in files:
                run.add_file(file, progress)
        written = run.finish()
    except OSError as error:
        raise ArgosyError(
            "data.write-failed",
            f"{output}: {error.strerror or error}",
            fix="free some space, or choose another --output",
        ) from None
    finally:
        run.close()
    _check_bad(run, options.max_bad, output)
    manifest = run.manifest(written)
    write_manifest(output, manifest)
    return manifest


def preview(inputs: Sequence[Path], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> str:
    """What `prepare` would do, having checked what can be checked without reading the text."""
    files = find_inputs(inputs)
    eod = f"id {tokenizer.eod_id} ends each document" if options.append_eod else "no end-of-document token"
    lines = [f"{file}  {file.stat().st_size:,} bytes" for file in files]
    total = sum(file.stat().st_size for file in files)
    lines.append(f"{len(files)} files, {total:,} bytes -> {output} ({dtype_for(tokenizer.vocab_size).name} tokens)")
    lines.append(f"tokenizer {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size:,} entries, {eod}")
    return "\n".join(lines)


def describe(manifest: Manifest, output: Path) -> str:
    """The books of a finished corpus in a few lines."""
    bad = sum(manifest.quarantined.values())
    seen = manifest.documents + bad
    lines = [f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype})"]
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


def train_tokenizer_on(inputs: Sequence[Path], vocab_size: int, output: Path, key: str) -> str:
    """Train a BPE on the good documents of the inputs; a line that says what came out."""
    bad = 0

    def texts() -> Iterator[str]:
        nonlocal bad
        for file in find_inputs(inputs):
            for record in read_documents(file, key=key, text_unit="file"):
                if isinstance(record, BadRecord):
                    bad += 1
                else:
                    yield record.text

    trained = train_bpe(texts(), vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(trained, encoding="utf-8")
    tokenizer = load_tokenizer(str(output))
    skipped = f"; {bad:,} bad records skipped" if bad else ""
    return f"{output}: {tokenizer.vocab_size:,} entries, fingerprint {tokenizer.fingerprint[:12]}{skipped}"


class _Run:
    """One pass over the inputs: batches of documents in, one shard out, with the books kept."""

    def __init__(self, tokenizer: Tokenizer, eod: int | None, output: Path, options: PrepareOptions) -> None:
        self.tokenizer, self.eod, self.output, self.options = tokenizer, eod, output, options
        self.writer = IndexedWriter(output / SHARD, dtype_for(tokenizer.vocab_size))
        self.quarantine = JsonlWriter(output / QUARANTINE_FILE)
        self.bad: Counter[str] = Counter()
        self.documents_in = self.documents_out = 0
        self.sources: list[Source] = []
        self._finished = False

    def add_file(self, file: Path, progress: Progress) -> None:
        documents_before, bad_before = self.documents_out, self.bad.total()
        batch: list[str] = []
        size = 0
        for record in read_documents(file, key=self.options.key, text_unit=self.options.text_unit):
            self.documents_in += 1
            size += record.size
            if isinstance(record, BadRecord):
                self._set_aside(record)
            else:
                batch.append(record.text)
            if size >= _BATCH_BYTES:
                self._encode(batch)
                progress.advance(size)
                batch, size = [], 0
        self._encode(batch)
        progress.advance(size)
        self.sources.append(
            Source(
                path=str(file),
                bytes=file.stat().st_size,
                documents=self.documents_out - documents_before,
                quarantined=self.bad.total() - bad_before,
            )
        )

    def finish(self) -> Written:
        written = self.writer.finish()
        self._finished = True
        if written.documents != self.documents_out or self.documents_in != self.documents_out + self.bad.total():
            raise RuntimeError(
                f"documents were lost: {self.documents_in} in, {written.documents} out, {self.bad.total()} quarantined"
            )
        if self.quarantine.lost:
            raise OSError(f"{self.quarantine.lost} quarantined records could not be written")
        return written

    def close(self) -> None:
        self.quarantine.close()
        if not self._finished:
            self.writer.abandon()

    def manifest(self, written: Written) -> Manifest:
        (self.output / TOKENIZER_FILE).write_text(self.tokenizer.to_json(), encoding="utf-8")
        facts = TokenizerFacts(
            fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            eod_id=self.eod,
            file=TOKENIZER_FILE,
        )
        return Manifest(
            tokenizer=facts,
            append_eod=self.eod is not None,
            dtype=str(self.writer.dtype.name),
            shards=[Shard(name=SHARD, **asdict(written))],
            sources=self.sources,
            quarantined=dict(sorted(self.bad.items())),
        )

    def _encode(self, texts: list[str]) -> None:
        for ids in self.tokenizer.encode_batch(texts):
            self.writer.add_document([ids if self.eod is None else np.append(ids, self.eod)])
            self.documents_out += 1

    def _set_aside(self, record: BadRecord) -> None:
        self.bad[record.kind] += 1
        self.quarantine.write(asdict(record))


def _claim(output: Path, overwrite: bool) -> None:
    if (output / FILE_NAME).exists() and not overwrite:
        raise ArgosyError(
            "data.output-exists",
            f"{output} already holds a prepared corpus",
            key="--output",
            value=str(output),
            fix="choose another directory, or pass --overwrite to replace it",
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / FILE_NAME).unlink(missing_ok=True)  # from here until the end the directory is not a corpus
        (output / QUARANTINE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ArgosyError(
            "data.write-failed", f"{output} cannot be made: {error.strerror}", fix="choose a writable --output"
        ) from None


def _check_bad(run: _Run, max_bad: float, output: Path) -> None:
    share = run.bad.total() / max(1, run.documents_in)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in run.bad.most_common())
    if run.documents_out == 0 or share > max_bad:
        what = (
            "no document could be used"
            if run.documents_out == 0
            else f"{share:.2%} is more than --max-bad {max_bad:.2%}"
        )
        raise ArgosyError(
            "data.bad-records",
            f"{run.bad.total():,} of {run.documents_in:,} records were quarantined ({kinds or 'none'}): {what}",
            fix=f"see {output / QUARANTINE_FILE}; is --key {run.options.key!r} right?",
        )

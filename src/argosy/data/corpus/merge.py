"""`argosy data merge`: merge several corpora or Megatron pairs into one.

Merging into a pair gives the output of Megatron's `tools/merge_datasets.py`, byte for byte: the `.bin` files concatenated,
lengths and document bounds carried over, pointers recomputed. Merging into a corpus directory, which requires that all inputs
are corpora, renumbers the shards and keeps the hashes of their manifests, so a damaged input stays detectable. The kernel
copies the bytes (some file systems only share them), memory stays small, and a file gets its final name only when complete.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from argosy.console.progress_bar import ProgressBar
from argosy.data.corpus.block_hashes import blocks_path
from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.corpus_manifest import FILE_NAME, Manifest, write_manifest
from argosy.data.corpus.indexed import CODES, HEADER, MAGIC, bin_path, idx_path
from argosy.data.corpus.pairs import open_pairs
from argosy.data.text.tokenizer import LARGEST_TOKENIZER
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.untrusted import open_regular, read_regular

# The size of one kernel copy.
_CHUNK = 64 << 20  # bytes
# The name that `argosy data prepare` uses.
_QUARANTINE = "quarantine.jsonl"
# Index entries in memory at a time.
_ENTRIES = 1 << 18
# Errors that mean that a way of copying is not supported here.
_UNSUPPORTED = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


@dataclass(frozen=True)
class Merged:
    """The result of `merge`."""

    output: str
    # "pair" or "corpus".
    kind: str
    inputs: list[str]
    shards: int
    documents: int
    sequences: int
    tokens: int
    # The size of all .bin and .idx files.
    bytes: int
    dtype: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def describe(self) -> str:
        what = f"a corpus of {self.shards:,} shards" if self.kind == "corpus" else "one pair"
        return (
            f"{self.output}: {what} from {len(self.inputs):,} inputs: {self.documents:,} documents, {self.tokens:,} tokens "
            f"({self.dtype}), {self.bytes:,} bytes"
        )


def merge(
    inputs: Sequence[Path], output: Path, *, as_pair: bool | None = None, overwrite: bool = False, dry_run: bool = False
) -> Merged:
    """Merge the inputs in the given order.

    Args:
        inputs: Corpora or pairs.
        output: The corpus directory, or the prefix of the pair.
        as_pair: Write one pair. None: write a corpus if every input is one, else a pair.
        overwrite: Replace existing data at `output`.
        dry_run: Only check, and return the expected result.

    Raises:
        ArgosyError: `data.cannot-merge`, `tokenizer.mismatch`, `data.output-exists`, `data.write-failed`.
    """
    corpora = [open_pairs(path) for path in inputs]
    try:
        pair = any(corpus.manifest is None for corpus in corpora) if as_pair is None else as_pair
        job = _Merge(corpora, output, pair)
        job.check(overwrite)
        if not dry_run:
            job.run()
        return job.result()
    except OSError as error:
        raise ArgosyError(
            "data.write-failed",
            f"{output}: {error.strerror or error}",
            fix="free some space, or choose another --output; nothing half-written is left behind",
        ) from None
    finally:
        for corpus in corpora:
            for shard in corpus.shards:
                shard.close()


class _Merge:
    def __init__(self, corpora: list[Corpus], output: Path, pair: bool) -> None:
        self.corpora, self.pair = corpora, pair
        self.output = output.with_suffix("") if pair and output.suffix in (".bin", ".idx") else output
        self.readers = [shard for corpus in corpora for shard in corpus.shards]
        self.sequences = sum(reader.sequences for reader in self.readers)
        self.documents = sum(reader.documents for reader in self.readers)
        self.tokens = sum(reader.tokens for reader in self.readers)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.readers[0].dtype

    @property
    def size(self) -> int:
        """The size in bytes of all files to be written."""
        pairs = 1 if self.pair else len(self.readers)
        index = pairs * (HEADER.size + 8) + 12 * self.sequences + 8 * self.documents
        return index + self.tokens * self.dtype.itemsize

    def result(self) -> Merged:
        return Merged(
            output=str(self.output),
            kind="pair" if self.pair else "corpus",
            inputs=[str(corpus.path) for corpus in self.corpora],
            shards=1 if self.pair else len(self.readers),
            documents=self.documents,
            sequences=self.sequences,
            tokens=self.tokens,
            bytes=self.size,
            dtype=self.dtype.name,
        )

    def check(self, overwrite: bool) -> None:
        """Refuse everything that can be refused before a byte is written."""
        self._check_dtypes()
        self._check_manifests()
        outputs = [bin_path(self.output), idx_path(self.output)] if self.pair else [self.output / FILE_NAME]
        sources = {
            _real(file) for reader in self.readers for file in (bin_path(reader.prefix), idx_path(reader.prefix))
        }
        if any(_real(file) in sources for file in outputs) or (
            not self.pair and any(source.parent == _real(self.output) for source in sources)
        ):
            raise _cannot(
                f"{self.output} is also an input: it would be overwritten while it is read", "choose another --output"
            )
        if any(file.exists() for file in outputs) and not overwrite:
            raise ArgosyError(
                "data.output-exists",
                f"{self.output} already holds data",
                key="--output",
                value=str(self.output),
                fix="choose another name, or pass --overwrite to replace it",
            )
        existing = next(parent for parent in self.output.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(existing).free
        if free < self.size:
            raise ArgosyError(
                "data.write-failed",
                f"the merged files need {self.size:,} bytes, {existing} has {free:,} free",
                fix="free some space, or choose another --output",
            )

    def _check_dtypes(self) -> None:
        if not self.readers:
            raise _cannot("the inputs hold no pair", "give corpora or prefixes that hold data")
        for reader in self.readers:
            if reader.dtype != self.dtype:
                raise _cannot(
                    f"{self.readers[0].prefix} holds {self.dtype.name} tokens, {reader.prefix} holds {reader.dtype.name}",
                    "merge only data of one dtype, or prepare one of them again with the other's tokenizer",
                )

    def _check_manifests(self) -> None:
        """Refuse inputs with different tokenizers. For a corpus, also refuse different end-of-document ids or missing manifests."""
        named = [(corpus.path, corpus.manifest) for corpus in self.corpora if corpus.manifest is not None]
        for path, manifest in named:
            first_path, first = named[0]
            if manifest.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise ArgosyError(
                    "tokenizer.mismatch",
                    f"{first_path} was prepared with tokenizer {first.tokenizer.fingerprint[:12]}, {path} with "
                    f"{manifest.tokenizer.fingerprint[:12]}: their ids mean different text",
                    fix="merge only data of one tokenizer",
                )
            if not self.pair and (manifest.append_eod, manifest.tokenizer.eod_id) != (
                first.append_eod,
                first.tokenizer.eod_id,
            ):
                raise _cannot(
                    f"documents of {first_path} and {path} do not end alike (end-of-document id "
                    f"{first.tokenizer.eod_id} and {manifest.tokenizer.eod_id})",
                    "prepare one of them again, or merge with --pair",
                )
            if not self.pair and manifest.chat != first.chat:
                raise _cannot(
                    f"{first_path} and {path} are not both texts, or both conversations of one chat template",
                    "merge with --pair, without the loss masks; or name both in data.train",
                )
        bare = [corpus.path for corpus in self.corpora if corpus.manifest is None]
        if bare and not self.pair:
            raise _cannot(f"{bare[0]} has no manifest, so its tokenizer is unknown", "merge with --pair")

    def run(self) -> None:
        made: list[Path] = []
        try:
            with ProgressBar("merge", sum(r.tokens * r.dtype.itemsize for r in self.readers), "B") as progress:
                if self.pair:
                    self._write_pair(made, progress.advance)
                else:
                    self._write_corpus(made, progress.advance)
        except BaseException:
            for file in made:
                file.unlink(missing_ok=True)
            raise

    def _write_pair(self, made: list[Path], advance: Callable[[float], None]) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        tokens, index = _partial(bin_path(self.output)), _partial(idx_path(self.output))
        made += [tokens, index]
        with tokens.open("wb") as file:
            for reader in self.readers:
                _append_file(bin_path(reader.prefix), file, advance)
            os.fsync(file.fileno())
        with index.open("wb") as file:
            file.writelines(self._index())
            file.flush()
            os.fsync(file.fileno())
        # An old index must never describe the new tokens.
        idx_path(self.output).unlink(missing_ok=True)
        os.replace(tokens, bin_path(self.output))
        os.replace(index, idx_path(self.output))

    def _index(self) -> Iterator[bytes]:
        yield HEADER.pack(MAGIC, 1, CODES[self.dtype], self.sequences, self.documents + 1)
        for reader in self.readers:
            yield from (block.tobytes() for block in _slices(reader.lengths))
        end = 0
        for reader in self.readers:
            for block in _slices(reader.lengths):
                ends = end + np.cumsum(block, dtype=np.int64) * self.dtype.itemsize
                yield (ends - block.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes()
                end = int(ends[-1])
        yield np.zeros(1, "<i8").tobytes()
        sequences = 0
        for reader in self.readers:
            yield from ((block + sequences).astype("<i8").tobytes() for block in _slices(reader.document_indices[1:]))
            sequences += reader.sequences

    def _write_corpus(self, made: list[Path], advance: Callable[[float], None]) -> None:
        manifests = [corpus.manifest for corpus in self.corpora if corpus.manifest is not None]
        self.output.mkdir(parents=True, exist_ok=True)
        # Without a manifest the directory is not a corpus until the new manifest is written.
        (self.output / FILE_NAME).unlink(missing_ok=True)
        for number, reader in enumerate(self.readers):
            for path in (bin_path, blocks_path, idx_path):
                source, target = path(reader.prefix), path(self.output / _shard_name(number))
                if path is blocks_path and not source.exists():
                    target.unlink(missing_ok=True)
                    continue
                made += [_partial(target), target]
                with _partial(target).open("wb") as file:
                    _append_file(source, file, advance if source.suffix == ".bin" else lambda _: None)
                    os.fsync(file.fileno())
                os.replace(_partial(target), target)
        self._join_quarantines(made)
        for stored in manifests[0].beside:
            made.append(self.output / stored)
            content = read_regular(self.corpora[0].path / stored, LARGEST_TOKENIZER)
            replace_file(self.output / stored, content, sync=True)
        self._remove_stale()
        write_manifest(self.output, _merge_manifests(manifests))

    def _join_quarantines(self, made: list[Path]) -> None:
        target = self.output / _QUARANTINE
        made.append(target)
        with target.open("wb") as file:
            for corpus in self.corpora:
                if (corpus.path / _QUARANTINE).exists():
                    _append_file(corpus.path / _QUARANTINE, file, lambda _: None)

    def _remove_stale(self) -> None:
        """Remove the surplus shards of an overwritten corpus. Tools that glob would take them for data."""
        kept = {_shard_name(number) for number in range(len(self.readers))}
        for file in self.output.glob("shard-*.*"):
            if file.suffix in (".bin", ".idx", ".blocks") and file.stem not in kept:
                file.unlink()


def _merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    shards = [shard for manifest in manifests for shard in manifest.shards]
    quarantined: Counter[str] = Counter()
    for manifest in manifests:
        quarantined.update(manifest.quarantined)
    return manifests[0].model_copy(
        update={
            "shards": [shard.model_copy(update={"name": _shard_name(i)}) for i, shard in enumerate(shards)],
            "sources": [source for manifest in manifests for source in manifest.sources],
            "quarantined": dict(sorted(quarantined.items())),
        }
    )


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def _real(path: Path) -> Path:
    """Return a path without links. A loop of links stays as it is, and cannot be written to; pathlib would raise RuntimeError."""
    return Path(os.path.realpath(path))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _slices(entries: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(entries), _ENTRIES):
        yield entries[start : start + _ENTRIES]


def _append_file(source: Path, target: BinaryIO, advance: Callable[[float], None]) -> None:
    """Append a whole file in the cheapest way that works: copy_file_range, then sendfile, then read and write."""
    with open_regular(source, buffering=0) as file:
        size, done = os.fstat(file.fileno()).st_size, 0
        ways = [_copy_range, _send, _read_and_write] if hasattr(os, "copy_file_range") else [_read_and_write]
        while done < size:
            try:
                moved = ways[0](file.fileno(), target.fileno(), min(_CHUNK, size - done), done)
            except OSError as error:
                if error.errno in _UNSUPPORTED and len(ways) > 1:
                    ways.pop(0)
                    continue
                raise
            # Some network file systems return 0 instead of an error.
            if not moved and len(ways) > 1:
                ways.pop(0)
            elif not moved:
                raise OSError(errno.EIO, f"{source} became shorter while it was read")
            done += moved
            advance(moved)


def _copy_range(source: int, target: int, count: int, offset: int) -> int:
    return os.copy_file_range(source, target, count, offset)


def _send(source: int, target: int, count: int, offset: int) -> int:
    return os.sendfile(target, source, offset, count)


def _read_and_write(source: int, target: int, count: int, offset: int) -> int:
    data = memoryview(os.pread(source, min(count, 1 << 22), offset))
    written = 0
    while written < len(data):
        written += os.write(target, data[written:])
    return written


def _cannot(cause: str, fix: str) -> ArgosyError:
    return ArgosyError("data.cannot-merge", cause, fix=fix)

"""`argosy data verify`: check every file of a corpus against its manifest, and every `.idx` against its `.bin`.

Files are read completely, in blocks, so memory does not grow with the corpus. Shards are checked in parallel threads, because
hashing releases the GIL. A fault never ends the check: the user needs the whole list before copying terabytes again. A fault
that repeats (a million wrong pointers) is one line with the count and the first place.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from argosy.console.progress_bar import ProgressBar
from argosy.data.corpus.block_hashes import BLOCK, DIGEST, blocks_of, blocks_path, wrong_blocks
from argosy.data.corpus.corpus_manifest import ChatFacts, Manifest, Shard
from argosy.data.corpus.indexed import DTYPES, HEADER, MAGIC, bin_path, idx_path
from argosy.data.corpus.pairs import Pairs, find_pairs
from argosy.data.text.tokenizer import load_tokenizer
from argosy.errors import ArgosyError
from argosy.untrusted import MIB, open_regular, read_regular

# The read buffer of each worker.
_BLOCK = 8 << 20  # bytes
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Fault:
    """A fault of one file."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`."""

    path: str
    has_manifest: bool
    shards: int
    files: int
    bytes: int
    documents: int
    tokens: int
    faults: list[Fault]

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "faults": [vars(fault) for fault in self.faults], "good": not self.faults}

    def describe(self) -> str:
        against = "sizes, index and hashes" if self.has_manifest else "sizes and index (no manifest, so no hashes)"
        lines = [
            f"{self.path}: shards {self.shards:,}, files {self.files:,}, {self.bytes:,} bytes, "
            f"{self.documents:,} documents, {self.tokens:,} tokens",
            *(f"  fault  {fault}" for fault in self.faults),
            f"checked {against}: " + (f"faults: {len(self.faults):,}" if self.faults else "all good"),
        ]
        return "\n".join(lines)

    def refuse_faults(self) -> None:
        """Raise `data.corrupt` if there are faults. `describe` lists all of them."""
        if self.faults:
            more = f" and {len(self.faults) - 1:,} more" if len(self.faults) > 1 else ""
            raise ArgosyError(
                "data.corrupt",
                f"{self.path} is damaged: {self.faults[0]}{more}",
                fix="copy the named files again from where they are whole, or prepare the corpus again",
            )


def verify(path: Path, *, workers: int = 1) -> VerifyReport:
    """Check all pairs under `path` with `workers` threads. Faults are returned; only a path without pairs is refused."""
    pairs = find_pairs(path)
    promised: list[Shard | None] = list(pairs.manifest.shards) if pairs.manifest else [None] * len(pairs.prefixes)
    vocab_size = pairs.manifest.tokenizer.vocab_size if pairs.manifest else None
    files = [file for prefix in pairs.prefixes for file in (bin_path(prefix), idx_path(prefix))]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    lock = threading.Lock()
    with ProgressBar("verify", sum(sizes), "B") as progress, ThreadPoolExecutor(workers) as pool:

        def advance(done: int) -> None:
            with lock:
                progress.advance(done)

        checks = [
            _PairCheck(prefix, shard, vocab_size, pairs.manifest.dtype if pairs.manifest else None, advance)
            for prefix, shard in zip(pairs.prefixes, promised, strict=True)
        ]
        list(pool.map(_PairCheck.run, checks))
    faults = [fault for check in checks for fault in check.faults]
    return VerifyReport(
        path=str(pairs.path),
        has_manifest=pairs.manifest is not None,
        shards=len(checks),
        files=len(sizes),
        bytes=sum(sizes),
        documents=sum(check.documents for check in checks),
        tokens=sum(check.tokens for check in checks),
        faults=faults + _check_whole(pairs),
    )


@dataclass
class _PairCheck:
    """The check of one pair. `run` records faults of the files and never raises for them."""

    prefix: Path
    promised: Shard | None
    vocab_size: int | None
    promised_dtype: str | None
    advance: Advance
    faults: list[Fault] = field(default_factory=list)
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    dtype: np.dtype[Any] | None = None
    # The hashes of the blocks of each file, if the corpus has a `.blocks` file.
    bin_digests: bytes = b""
    idx_digests: bytes = b""

    def run(self) -> None:
        if self.promised is not None and self.promised.blocks_sha256 is not None:
            self._read_digests(blocks_path(self.prefix), self.promised.blocks_sha256)
        for file, check in ((idx_path(self.prefix), self._check_index), (bin_path(self.prefix), self._check_tokens)):
            try:
                with open_regular(file, buffering=0) as opened:
                    check(opened, file)
            except OSError as error:
                self._fault(file, f"cannot be read: {error.strerror or error}")

    def _read_digests(self, path: Path, promised: str) -> None:
        try:
            with open_regular(path) as opened:
                content = opened.read()
        except OSError as error:
            return self._fault(path, f"cannot be read: {error.strerror or error}")
        if (found := hashlib.sha256(content).hexdigest()) != promised:
            return self._fault(path, _other_hash(promised, found))
        widths = {dtype.name: dtype.itemsize for dtype in DTYPES.values()}
        tokens = self.promised.tokens if self.promised is not None else 0
        end = DIGEST * blocks_of(tokens * widths.get(self.promised_dtype or "", 1))
        self.bin_digests, self.idx_digests = content[:end], content[end:]

    def _fault(self, file: Path, what: str) -> None:
        self.faults.append(Fault(str(file), what))

    def _check_index(self, file: BinaryIO, path: Path) -> None:
        digest = _Digest(self.idx_digests)
        for block in _blocks(file, self.advance):
            digest.update(block)
        if self.promised and digest.hexdigest() != self.promised.idx_sha256:
            self._fault(path, digest.describe(self.promised.idx_sha256))
        size = os.fstat(file.fileno()).st_size
        if size < HEADER.size:
            return self._fault(path, f"has {size} bytes, fewer than its {HEADER.size}-byte header")
        magic, version, code, sequences, bounds = HEADER.unpack(os.pread(file.fileno(), HEADER.size, 0))
        if magic != MAGIC or version != 1 or code not in DTYPES:
            return self._fault(path, "does not start as a Megatron index of version 1")
        self.dtype = DTYPES[code]
        if self.promised_dtype is not None and self.dtype.name != self.promised_dtype:
            self._fault(path, f"says {self.dtype.name} tokens, the manifest {self.promised_dtype}")
        needed = HEADER.size + 12 * sequences + 8 * bounds
        if size != needed:
            return self._fault(
                path,
                f"{sequences:,} sequences and {bounds:,} document bounds need {needed:,} bytes, the file has {size:,}",
            )
        self.sequences, self.documents = sequences, bounds - 1
        self._check_sequences(file, path, self.dtype.itemsize)
        self._check_documents(file, path, bounds)
        self._check_counts(path)

    def _check_sequences(self, file: BinaryIO, path: Path, itemsize: int) -> None:
        """Check that no length is negative, and that each pointer equals the end of the sequences before it."""
        negative, wrong = _Repeated(), _Repeated()
        step = _BLOCK // 16
        for first in range(0, self.sequences, step):
            count = min(step, self.sequences - first)
            lengths = _array(file, "<i4", HEADER.size + 4 * first, count).astype(np.int64)
            pointers = _array(file, "<i8", HEADER.size + 4 * self.sequences + 8 * first, count)
            expected = (self.tokens + np.cumsum(lengths) - lengths) * itemsize
            negative.add(lengths < 0, first, lengths, lengths)
            wrong.add(pointers != expected, first, expected, pointers)
            self.tokens += int(lengths.sum())
        if negative.times:
            self._fault(path, f"{negative.times:,} sequences have a negative length, first number {negative.first:,}")
        if wrong.times:
            self._fault(
                path,
                f"{wrong.times:,} of {self.sequences:,} pointers are not where the sequences before end, first number "
                f"{wrong.first:,}: {wrong.found:,} instead of {wrong.expected:,}",
            )

    def _check_documents(self, file: BinaryIO, path: Path, bounds: int) -> None:
        """Check that document bounds rise from 0 to the number of sequences."""
        if bounds == 0:
            return self._fault(path, "has no document bounds, not even the 0 they start with")
        backwards = _Repeated()
        previous = 0
        for first in range(0, bounds, _BLOCK // 8):
            block = _array(file, "<i8", HEADER.size + 12 * self.sequences + 8 * first, min(_BLOCK // 8, bounds - first))
            if first == 0 and block[0] != 0:
                self._fault(path, f"its first document starts at sequence {block[0]:,} instead of 0")
                previous = int(block[0])
            before = np.concatenate(([previous], block[:-1]))
            backwards.add(block < before, first, before, block)
            previous = int(block[-1])
        if backwards.times:
            self._fault(
                path,
                f"{backwards.times:,} document bounds go backwards, first number {backwards.first:,}: "
                f"{backwards.found:,} after {backwards.expected:,}",
            )
        if previous != self.sequences:
            self._fault(path, f"its documents end at sequence {previous:,}, but it lists {self.sequences:,} sequences")

    def _check_counts(self, path: Path) -> None:
        for name in ("documents", "sequences", "tokens") if self.promised else ():
            found, promised = getattr(self, name), getattr(self.promised, name)
            if found != promised:
                self._fault(path, f"describes {found:,} {name}, the manifest promises {promised:,}")

    def _check_tokens(self, file: BinaryIO, path: Path) -> None:
        size = os.fstat(file.fileno()).st_size
        if self.dtype is not None and size != self.tokens * self.dtype.itemsize:
            self._fault(
                path,
                f"has {size:,} bytes, but its .idx describes {self.tokens:,} tokens of {self.dtype.itemsize} bytes = "
                f"{self.tokens * self.dtype.itemsize:,}",
            )
        digest = _Digest(self.bin_digests)
        smallest, largest = 0, 0
        for block in _blocks(file, self.advance):
            digest.update(block)
            if self.dtype is not None and self.dtype.kind in "iu":
                tokens = np.frombuffer(block, self.dtype, len(block) // self.dtype.itemsize)
                if len(tokens):
                    smallest, largest = min(smallest, int(tokens.min())), max(largest, int(tokens.max()))
        if self.promised and digest.hexdigest() != self.promised.bin_sha256:
            self._fault(path, digest.describe(self.promised.bin_sha256))
        if smallest < 0:
            self._fault(path, f"holds the negative token id {smallest:,}")
        if self.promised and self.dtype is not None and largest != self.promised.max_token:
            self._fault(path, f"its largest token id is {largest:,}, the manifest promises {self.promised.max_token:,}")
        if self.vocab_size is not None and largest >= self.vocab_size:
            self._fault(path, f"holds token id {largest:,}, the tokenizer's vocabulary ends at {self.vocab_size - 1:,}")


class _Digest:
    """The sha256 of a file, and the blocks whose hash differs, if block hashes are known."""

    def __init__(self, digests: bytes) -> None:
        self._digests, self._whole = digests, hashlib.sha256()
        self._size = 0
        self._wrong: list[int] = []

    def update(self, data: memoryview) -> None:
        self._whole.update(data)
        if self._digests:
            self._wrong.extend(wrong_blocks(self._digests, self._size // BLOCK, data))
        self._size += len(data)

    def hexdigest(self) -> str:
        return self._whole.hexdigest()

    def describe(self, promised: str) -> str:
        text = _other_hash(promised, self.hexdigest())
        if not self._wrong:
            return text
        first = self._wrong[0] * BLOCK
        more = f" and {len(self._wrong) - 1:,} more" if len(self._wrong) > 1 else ""
        end = min(first + BLOCK, self._size) - 1
        return (
            f"{text}; block {self._wrong[0]:,} (bytes {first:,} to {end:,}){more} of {blocks_of(self._size):,} differs"
        )


@dataclass
class _Repeated:
    """A fault that may occur at many places: the number of times, and the first place."""

    times: int = 0
    first: int = 0
    expected: int = 0
    found: int = 0

    def add(self, at: npt.NDArray[np.bool_], offset: int, expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> None:
        here = int(np.count_nonzero(at))
        if here and not self.times:
            place = int(np.argmax(at))
            self.first, self.expected, self.found = offset + place, int(expected[place]), int(found[place])
        self.times += here


def _check_whole(pairs: Pairs) -> list[Fault]:
    """Check the parts of a corpus that belong to no single pair: tokenizer, chat template, and the counts in the manifest."""
    manifest = pairs.manifest
    if manifest is None:
        return []
    faults = [] if manifest.chat is None else _check_template(pairs.path / manifest.chat.file, manifest.chat)
    faults += _check_tokenizer(pairs.path / manifest.tokenizer.file, manifest)
    return faults + _check_totals(pairs.path, manifest)


def _check_template(path: Path, chat: ChatFacts) -> list[Fault]:
    try:
        found = hashlib.sha256(read_regular(path, MIB)).hexdigest()
    except OSError as error:
        return [Fault(str(path), f"cannot be read: {error.strerror}")]
    return (
        []
        if found == chat.template_sha256
        else [Fault(str(path), "is not the chat template that the manifest promises")]
    )


def _check_tokenizer(path: Path, manifest: Manifest) -> list[Fault]:
    try:
        tokenizer = load_tokenizer(str(path))
    except ArgosyError as error:
        # A missing library says nothing about the tokenizer file, so it must not be reported as damage.
        if error.code == "data.missing-extra":
            raise
        return [Fault(str(path), error.cause)]
    promised = manifest.tokenizer
    faults = []
    if tokenizer.fingerprint != promised.fingerprint:
        faults.append(f"is tokenizer {tokenizer.fingerprint[:12]}, the manifest promises {promised.fingerprint[:12]}")
    if tokenizer.vocab_size != promised.vocab_size:
        faults.append(f"has {tokenizer.vocab_size:,} entries, the manifest promises {promised.vocab_size:,}")
    return [Fault(str(path), what) for what in faults]


def _check_totals(path: Path, manifest: Manifest) -> list[Fault]:
    faults = []
    from_sources = sum(source.documents for source in manifest.sources)
    if from_sources != manifest.documents:
        faults.append(f"its sources gave {from_sources:,} documents, its shards hold {manifest.documents:,}")
    from_sources, bad = sum(source.quarantined for source in manifest.sources), sum(manifest.quarantined.values())
    if from_sources != bad:
        faults.append(f"its sources gave {from_sources:,} quarantined records, its totals list {bad:,}")
    names = [shard.name for shard in manifest.shards]
    faults.extend(f"lists {name} twice" for name in sorted({name for name in names if names.count(name) > 1}))
    return [Fault(str(path / "manifest.json"), what) for what in faults]


def _blocks(file: BinaryIO, advance: Advance) -> Iterator[memoryview]:
    """Yield the whole file in blocks through one buffer."""
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    filled = 0
    while True:
        read = os.readv(file.fileno(), [view[filled:]])
        filled += read
        # Yield only whole blocks, so that no token is cut in two.
        if filled == _BLOCK or not read:
            yield view[:filled]
            advance(filled)
            filled = 0
        if not read:
            return


def _array(file: BinaryIO, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    wanted = count * np.dtype(dtype).itemsize
    raw = b""
    # A network file system may return fewer bytes than requested.
    while len(raw) < wanted:
        part = os.pread(file.fileno(), wanted - len(raw), offset + len(raw))
        if not part:
            raise OSError("it became shorter while it was read")
        raw += part
    return np.frombuffer(raw, dtype)


def _other_hash(promised: str, found: str) -> str:
    return f"its sha256 is {found[:16]}…, the manifest promises {promised[:16]}…"

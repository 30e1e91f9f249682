"""Megatron-core's sample order of a GPTDataset, bit for bit, for runs that must continue or match a Megatron run.

Megatron repeats the documents of a split for each epoch, shuffles them, concatenates them, cuts the stream every `seq_len`
tokens and shuffles the samples. Its rank 0 builds three index arrays while all other ranks wait. Here every process builds
the order by itself: both shuffles use numpy's legacy generator, which gives the same draws on every machine, and the start
of a sample is looked up in cumulative token counts, kept for one document in 32, instead of a table of all samples.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.samples.megatron_blend import normalise
from argosy.data.samples.order import Indices
from argosy.errors import ArgosyError

# (sequence number within the split, token offset in the sequence, number of tokens)
Piece = tuple[int, int, int]

# If less than this fraction of the last epoch is needed, Megatron shuffles that epoch separately.
_FINAL_EPOCH_SHARE = 0.80
# Documents between two cumulative token counts.
_BLOCK = 32
# Documents whose lengths are gathered at a time; a multiple of _BLOCK.
_CHUNK = 1 << 20
_DIGEST = hashlib.sha256().digest_size


def split_ranges(shares: Sequence[float], sequences: int) -> list[tuple[int, int]]:
    """Return the sequences [first, last) of each split.

    Megatron splits by sequence, not by document, and normalises the shares before adding them up, which can round to
    another sequence than adding first.
    """
    bounds, running = [0], 0.0
    for share in normalise(shares):
        running += share
        bounds.append(round(running * float(sequences)))
    return list(pairwise(bounds))


class MegatronSamples:
    """The samples of one split in the order of Megatron's GPTDataset. `pieces(i)` gives the token ranges of sample i."""

    def __init__(
        self,
        lengths: npt.NDArray[np.int32],
        *,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        extra_token: bool = True,
        cache_dir: Path | None = None,
        name: str = "train",
        where: str = "the corpus",
    ) -> None:
        """Build the order, or map it from the cache.

        Args:
            lengths: The number of tokens of each sequence of the split.
            seq_len: The sequence length of a sample.
            num_samples: The minimum number of samples. None: one epoch.
            seed: The seed of both shuffles, of 32 bits.
            extra_token: Add the token after the last one, which the labels need.
            cache_dir: The directory of the cache. None: no cache.
            name: The name of the split, for error messages.
            where: The name of the corpus, for error messages.
        """
        _check_numbers(seq_len=seq_len, num_samples=num_samples, seed=seed)
        self.seq_len, self.num_samples, self.seed = seq_len, num_samples, seed
        self._lengths, self._extra = lengths, int(extra_token)
        # The number of tokens in one epoch.
        self.tokens = int(np.sum(lengths, dtype=np.int64))
        if self.tokens == 0 or (num_samples is None and self.tokens < seq_len + self._extra):
            raise ArgosyError(
                "data.empty-split",
                f"the {name} split of {where} has {len(lengths):,} sequences = {self.tokens:,} tokens; one sample of data.seq_len "
                f"{seq_len} needs {seq_len + self._extra:,}" + (" (with the token after it)" if extra_token else ""),
                key="data.split",
                fix=f"give {name} a larger share, add data, or shorten data.seq_len"
                + ("; `eval: off` needs no validation split" if name == "validation" else ""),
            )
        self.epochs = 1
        if num_samples is not None:
            self.epochs = max(1, -(-(num_samples * seq_len + self._extra) // self.tokens))
        self._apart = self._samples_shuffled_apart()
        # Why the cache could not be written. The samples do not depend on it.
        self.cache_problem: str | None = None
        self._block_starts, self._documents, self._samples = self._load_or_build(cache_dir)

    def __len__(self) -> int:
        return self._samples_in(self.epochs)

    def pieces(self, index: int) -> list[Piece]:
        """Return the token ranges that make up sample `index`: seq_len tokens, plus one with `extra_token`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = int(self._samples[index]) * self.seq_len
        end = start + self.seq_len + self._extra
        block = int(self._block_starts.searchsorted(start, "right")) - 1
        block_end = int(self._block_starts.searchsorted(end, "left"))
        documents = self._documents[block * _BLOCK : block_end * _BLOCK]
        lengths = self._lengths[documents]
        ends = lengths.cumsum(dtype=np.int64)
        ends += self._block_starts[block]
        first, last = int(ends.searchsorted(start, "right")), int(ends.searchsorted(end, "left"))
        offset, wanted = start - int(ends[first]) + int(lengths[first]), end - start
        found = []
        here = slice(first, last + 1)
        for document, length in zip(documents[here].tolist(), lengths[here].tolist(), strict=True):
            count = min(length - offset, wanted)
            # Skip empty documents.
            if count:
                found.append((document, offset, count))
            offset, wanted = 0, wanted - count
        return found

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self.tokens - self._extra) // self.seq_len

    def _samples_shuffled_apart(self) -> int | None:
        """Return the first sample of a last epoch that is shuffled separately, or None if all epochs are shuffled together."""
        if self.num_samples is None or self.epochs == 1:
            return None
        before = self._samples_in(self.epochs - 1)
        # Megatron rounds the product down in floating point.
        return before if self.num_samples - before < int(_FINAL_EPOCH_SHARE * self._samples_in(1)) else None

    def _load_or_build(self, cache_dir: Path | None) -> tuple[Indices, npt.NDArray[np.int32], npt.NDArray[Any]]:
        if cache_dir is None:
            return self._build()
        documents, samples = self.epochs * len(self._lengths), len(self)
        layout: list[tuple[npt.DTypeLike, int]] = [
            ("<i8", -(-documents // _BLOCK) + 1),
            ("<i4", documents),
            (_sample_dtype(samples), samples),
        ]
        facts = ("argosy megatron order 1", self.seq_len, self.seed, self._extra, self.epochs, self._apart, layout)
        fingerprint = hashlib.sha256(repr(facts).encode())
        fingerprint.update(np.ascontiguousarray(self._lengths, "<i4").data)
        arrays = _read_cache(cache_dir, fingerprint.digest(), layout)
        if arrays is None:
            arrays = list(self._build())
            try:
                _write_cache(cache_dir, fingerprint.digest(), arrays)
            except OSError as error:
                self.cache_problem = f"{cache_dir}: {error.strerror}"
        return arrays[0], arrays[1], arrays[2]

    def _build(self) -> tuple[Indices, npt.NDArray[np.int32], npt.NDArray[Any]]:
        """Return the token count before each block of documents, the order of documents, and the order of samples.

        The draws follow Megatron's order: documents first, then samples.
        """
        generator = np.random.RandomState(self.seed)
        documents = np.tile(np.arange(len(self._lengths), dtype=np.int32), self.epochs)
        samples = np.arange(len(self), dtype=_sample_dtype(len(self)))
        document_bound = 0 if self._apart is None else (self.epochs - 1) * len(self._lengths)
        for order, bound in ((documents, document_bound), (samples, self._apart or 0)):
            # The parts are views, shuffled in place. An empty part draws nothing.
            for part in (order[:bound], order[bound:]):
                generator.shuffle(part)
        blocks = np.empty(-(-len(documents) // _BLOCK) + 1, np.int64)
        blocks[0] = 0
        for at in range(0, len(documents), _CHUNK):
            lengths = self._lengths[documents[at : at + _CHUNK]]
            sums = np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK), dtype=np.int64)
            blocks[at // _BLOCK + 1 : at // _BLOCK + 1 + len(sums)] = sums
        return np.cumsum(blocks, out=blocks), documents, samples


def _sample_dtype(samples: int) -> np.dtype[Any]:
    return np.dtype("<u4") if samples <= 1 << 32 else np.dtype("<i8")


def _check_numbers(*, seq_len: int, num_samples: int | None, seed: int) -> None:
    for key, value, good, allowed in (
        ("data.seq_len", seq_len, seq_len >= 1, "at least 1"),
        ("train.samples", num_samples, num_samples is None or num_samples >= 0, "not negative"),
        ("train.seed", seed, 0 <= seed < 1 << 32, "32 bits: 0 to 4,294,967,295, as numpy's legacy generator takes"),
    ):
        if not good:
            raise ArgosyError("config.bad-value", f"it must be {allowed}", key=key, value=value, fix="change the value")


# The cache is one .npy file of bytes, named by its fingerprint: `fingerprint | arrays | sha256 of everything before`.


def _npy_header(size: int) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
    return header.getvalue()


def _read_cache(
    directory: Path, fingerprint: bytes, layout: list[tuple[npt.DTypeLike, int]]
) -> list[npt.NDArray[Any]] | None:
    """Return the memory-mapped arrays of the cache file, or None if it is missing, truncated, damaged or of another order.

    The processes of a node share one copy in the page cache. The header is never parsed: it must equal the expected bytes.
    """
    size = 2 * _DIGEST + sum(np.dtype(dtype).itemsize * count for dtype, count in layout)
    header = _npy_header(size)
    try:
        with _cache_path(directory, fingerprint).open("rb") as file:
            if file.read(len(header)) != header or os.fstat(file.fileno()).st_size != len(header) + size:
                return None
            content = np.memmap(file, np.uint8, "r", len(header), (size,))
    except (OSError, ValueError):
        return None
    body, digest = content[:-_DIGEST], content[-_DIGEST:].tobytes()
    if body[:_DIGEST].tobytes() != fingerprint or hashlib.sha256(body.data).digest() != digest:
        return None
    arrays: list[npt.NDArray[Any]] = []
    at = _DIGEST
    for dtype, count in layout:
        arrays.append(np.frombuffer(body.data, dtype, count, at))
        at += arrays[-1].nbytes
    return arrays


def _write_cache(directory: Path, fingerprint: bytes, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Write the cache file atomically. Processes that write at once replace each other's file by an identical one."""
    directory.mkdir(parents=True, exist_ok=True)
    path = _cache_path(directory, fingerprint)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    digest = hashlib.sha256()
    try:
        with temporary.open("xb") as file:
            file.write(_npy_header(2 * _DIGEST + sum(array.nbytes for array in arrays)))
            for part in (np.frombuffer(fingerprint, np.uint8), *arrays):
                digest.update(part.data)
                file.write(part.data)
            file.write(digest.digest())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _cache_path(directory: Path, fingerprint: bytes) -> Path:
    return directory / f"megatron-order-{fingerprint.hex()[:32]}.npy"

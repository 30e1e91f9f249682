"""Megatron-core's own order of samples and of blends, bit for bit, for runs that must continue or match one of its.

Megatron repeats the documents of a split over the epochs asked for, shuffles them, lays them end to end, cuts the
stream every `seq_len` tokens and shuffles the cuts. Its rank 0 builds three arrays while all others wait. Here each
process does it alone: both shuffles are numpy's legacy generator, which gives the same draws everywhere, and where a
sample begins is looked up in running token counts, kept for one document in 32, instead of a table of all samples.

Its blend takes every sample from the set furthest behind its share. That walk has no closed form, but it soon forgets
where it began: many stretches of it are walked side by side from guessed beginnings, and those that prove wrong,
because the stretch before ended elsewhere, are walked again until all fit. Memory: the counts at every 65,536th sample
and the window in use.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.order import Indices
from argosy.errors import ArgosyError

Piece = tuple[int, int, int]  # sequence number within the split, token offset in it, tokens
_Counts = npt.NDArray[np.float64]  # [lane, set]: whole numbers, in the doubles that Megatron compares

SURPLUS = 0.005  # Megatron's margin of samples over what a set should give to a blend
_FINAL_EPOCH_SHARE = 0.80  # a last epoch of which less than this is needed is shuffled apart from the others
_BLOCK = 32  # documents between two running token counts
_CHUNK = 1 << 20  # documents whose lengths are gathered at a time; a multiple of _BLOCK
_WINDOW = 1 << 16  # blended samples between two checkpoints
_LANE = 1 << 10  # samples that one lane walks on the way to a checkpoint
_WINDOW_LANE = 1 << 8  # and inside a window, where the lanes are few
_LANES = 1 << 13  # walked side by side, at most
_MOST_SETS = 32766  # Megatron numbers them in 16 bits
_DIGEST = hashlib.sha256().digest_size


def split_ranges(shares: Sequence[float], sequences: int) -> list[tuple[int, int]]:
    """Sequences [first, last) of each split.

    Megatron cuts by sequence, not by document, and normalises the shares before adding them up, which can round to
    another sequence than adding first.
    """
    bounds, running = [0], 0.0
    for share in _normalise(shares):
        running += share
        bounds.append(round(running * float(sequences)))
    return list(pairwise(bounds))


class MegatronSamples:
    """The samples of one split as a GPTDataset gives them: `pieces(i)` says which tokens make up sample i."""

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
    ) -> None:
        """`lengths` are the tokens of each sequence of the split, `num_samples` the fewest samples to make (None: one
        epoch). `extra_token` draws the token after the last, which the labels need. `name` is for refusals."""
        _check_numbers(seq_len=seq_len, num_samples=num_samples, seed=seed)
        self.seq_len, self.num_samples, self.seed = seq_len, num_samples, seed
        self._lengths, self._extra = lengths, int(extra_token)
        self.tokens = int(np.sum(lengths, dtype=np.int64))  # in one epoch
        if self.tokens == 0 or (num_samples is None and self.tokens < seq_len + self._extra):
            raise ArgosyError(
                "data.empty-split",
                f"the {name} split has {len(lengths):,} sequences = {self.tokens:,} tokens; one sample of data.seq_len "
                f"{seq_len} needs {seq_len + self._extra:,}" + (" (with the token after it)" if extra_token else ""),
                key="data.split",
                fix=f"give {name} a larger share, add data, or shorten data.seq_len",
            )
        self.epochs = 1
        if num_samples is not None:
            self.epochs = max(1, -(-(num_samples * seq_len + self._extra) // self.tokens))
        self._apart = self._samples_shuffled_apart()
        self.cache_problem: str | None = None  # why the cache could not be written; the samples are right all the same
        self._block_starts, self._documents, self._samples = self._load_or_build(cache_dir)

    def __len__(self) -> int:
        return self._samples_in(self.epochs)

    def pieces(self, index: int) -> list[Piece]:
        """What to read and join for sample `index`: seq_len tokens, and the one after them with `extra_token`."""
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
            if count:  # not an empty document
                found.append((document, offset, count))
            offset, wanted = 0, wanted - count
        return found

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self.tokens - self._extra) // self.seq_len

    def _samples_shuffled_apart(self) -> int | None:
        """Where the samples of a mostly unused last epoch begin, or None if all epochs are shuffled as one."""
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
        """Token counts before each block of documents, the order of documents, the order of samples.

        The generator is used in Megatron's order: documents first, then samples.
        """
        generator = np.random.RandomState(self.seed)
        documents = np.tile(np.arange(len(self._lengths), dtype=np.int32), self.epochs)
        samples = np.arange(len(self), dtype=_sample_dtype(len(self)))
        document_bound = 0 if self._apart is None else (self.epochs - 1) * len(self._lengths)
        for order, bound in ((documents, document_bound), (samples, self._apart or 0)):
            for part in (order[:bound], order[bound:]):  # views: shuffled in place; an empty one draws nothing
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


# The cache: one .npy of bytes, `fingerprint | arrays | sha256 of all before`, named by its fingerprint.


def _npy_header(size: int) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
    return header.getvalue()


def _read_cache(
    directory: Path, fingerprint: bytes, layout: list[tuple[npt.DTypeLike, int]]
) -> list[npt.NDArray[Any]] | None:
    """The arrays of the file, or None if it is missing, cut short, damaged or another's. Mapped, so that the processes
    of a node share one copy; never parsed: its header must be the very bytes that the layout calls for."""
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
    """Appears whole or not at all; processes that write at once replace each other's file by an equal one."""
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


# Blending


@dataclass(frozen=True)
class BlendPlan:
    """What Megatron's builder makes of weights and a number of samples."""

    weights: list[float]  # normalised once; MegatronBlend normalises again, as Megatron does
    num_samples: list[int]  # to ask of each set: its share and a margin
    size: int  # of the blend: what was asked for, with each share rounded up


def plan_blend(weights: Sequence[float], size: int, surplus: float = SURPLUS) -> BlendPlan:
    """For weights given by the user: MegatronSamples of `num_samples[d]` each, under MegatronBlend(weights, size).

    Without weights Megatron makes one epoch of each set (`num_samples` None) and blends by their sample counts:
    MegatronBlend(counts, min(size, sum(counts))), or MegatronBlend(counts, None) to give every sample once. A single
    set without a weight is not blended at all: MegatronSamples of `num_samples` = size, with no margin.
    """
    _check_weights(weights)
    normalised = _normalise(weights)
    targets = [math.ceil(size * weight) for weight in normalised]
    return BlendPlan(normalised, [math.ceil(target * (1 + surplus)) for target in targets], sum(targets))


def _normalise(weights: Sequence[float]) -> list[float]:
    given = np.array(weights, np.float64)
    normalised: list[float] = (given / np.sum(given)).tolist()
    return normalised


def _check_weights(weights: Sequence[float]) -> None:
    if not 1 <= len(weights) <= _MOST_SETS or not all(0 < weight < math.inf for weight in weights):
        raise ArgosyError(
            "config.bad-value",
            f"Megatron blends 1 to {_MOST_SETS:,} sets, each of a weight above 0; these are {len(weights):,} sets, "
            f"{sum(not 0 < weight < math.inf for weight in weights):,} of them with another weight",
            key="data.train",
            value=list(weights),
            fix="leave out the sets that should give nothing",
        )


class MegatronBlend:
    """Sample i of a BlendedDataset -> (set, sample of that set)."""

    def __init__(self, weights: Sequence[float], size: int | None) -> None:
        """`size` samples in proportion to the weights, or with None weights[d] samples of each set d, no more."""
        _check_weights(weights)
        self._limits: _Counts | None = None
        self._size = sum(int(weight) for weight in weights) if size is None else size
        if size is None:
            self._limits = np.array(weights, np.float64)
            self.weights = self._limits / float(self._size)
        else:
            self.weights = np.array(_normalise(weights))
        self._checkpoints: list[_Counts] = [np.zeros(len(weights))]  # [set], at each multiple of _WINDOW
        self._window = -1
        self._set: Indices = np.zeros(0, np.int64)
        self._local: Indices = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._size

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """(set, sample of that set) of each index. Cheapest for indices close to each other and to earlier ones."""
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self._size):
            raise IndexError(f"samples {int(indices.min())} to {int(indices.max())} of {self._size}")
        if len(self.weights) == 1:
            return np.zeros(len(indices), np.int64), indices
        sets, local = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        windows = indices // _WINDOW
        for window in np.unique(windows).tolist():
            if window != self._window:
                self._fill(window)
            here = windows == window
            sets[here] = self._set[indices[here] % _WINDOW]
            local[here] = self._local[indices[here] % _WINDOW]
        return sets, local

    def counts(self, total: int) -> Indices:
        """How many of the first `total` samples each set gives."""
        window, rest = divmod(total, _WINDOW)
        self._reach(window)
        found = self._checkpoints[window].astype(np.int64)
        if rest:
            sets, _ = self.locate(np.arange(window * _WINDOW, total))
            found += np.bincount(sets, minlength=len(found))
        return found

    def refuse_oversampling(self, available: Sequence[int]) -> None:
        """Refuse a blend that takes more of a set than its samples, as Megatron does after building it."""
        # A set gives only when it is not ahead, so never more than one above its share: most blends need no counting.
        if all(have >= share * self._size + 2 for have, share in zip(available, self.weights, strict=True)):
            return
        for number, (have, taken) in enumerate(zip(available, self.counts(self._size).tolist(), strict=True)):
            if taken > have:
                raise ArgosyError(
                    "config.arithmetic",
                    f"the blend of {self._size:,} samples takes {taken:,} of set {number}, which has {have:,}",
                    key="data.train",
                    fix="make more samples of each set (a larger surplus), or lower its weight",
                )

    def _fill(self, window: int) -> None:
        self._reach(window)
        before, first = self._checkpoints[window], window * _WINDOW
        samples = min(_WINDOW, self._size - first)  # beyond the last one an exhausted blend has nothing to give
        _, picks = self._walk(before, first, -(-samples // _WINDOW_LANE), _WINDOW_LANE, record=True)
        picks = picks[:samples]
        by_set = np.argsort(picks, kind="stable")
        given = np.bincount(picks, minlength=len(before))
        first_of_set = np.cumsum(given) - given
        self._local = np.empty(samples, np.int64)
        self._local[by_set] = np.arange(samples) + np.repeat(before.astype(np.int64) - first_of_set, given)
        self._set, self._window = picks.astype(np.int64), window

    def _reach(self, window: int) -> None:
        """Count on until the checkpoint at the beginning of `window` is known."""
        while len(self._checkpoints) <= window:
            known, per_window = len(self._checkpoints) - 1, _WINDOW // _LANE
            lanes = min(_LANES, (window - known) * per_window)
            starts, _ = self._walk(self._checkpoints[known], known * _WINDOW, lanes, _LANE, record=False)
            self._checkpoints.extend(starts[per_window::per_window].copy())

    def _walk(
        self, counts: _Counts, first: int, lanes: int, steps: int, *, record: bool
    ) -> tuple[_Counts, npt.NDArray[np.int16]]:
        """`lanes` stretches of `steps` samples from sample `first` on, where the sets have given `counts`.

        Returns the counts at the beginning of each stretch and after the last, and with `record` the set of each
        sample. Every round proves at least one more lane right; nearly always the second or third proves them all.
        """
        begin = first + np.arange(lanes) * steps
        starts = np.empty((lanes + 1, len(counts)))
        starts[0], starts[1:-1] = counts, self._likely_counts(begin[1:])
        ends = np.empty((lanes, len(counts)))
        picks = np.empty((lanes, steps) if record else (0, 0), np.int16)
        todo = np.arange(lanes)
        while len(todo):
            ends[todo], walked = self._step_lanes(starts[todo], begin[todo], steps, record=record)
            if record:
                picks[todo] = walked.T
            wrong = (starts[1:-1] != ends[:-1]).any(axis=1)
            starts[1:] = ends
            todo = np.flatnonzero(wrong) + 1
        return starts, picks.reshape(-1)

    def _step_lanes(
        self, counts: _Counts, begin: Indices, steps: int, *, record: bool
    ) -> tuple[_Counts, npt.NDArray[np.int16]]:
        """Each lane's counts after `steps` samples, and the sets they came from, [step, lane].

        The error of a set is its share of the samples so far less what it gave; the largest gives next, the first of
        equals. Product and difference are rounded one after the other, as in Megatron's doubles.
        """
        picks = np.empty((steps if record else 0, len(begin)), np.int16)
        given, rows = counts.reshape(-1), np.arange(len(begin)) * counts.shape[1]
        weights = np.ascontiguousarray(np.broadcast_to(self.weights, counts.shape))
        errors = np.empty_like(counts)
        limits = self._limits
        if limits is not None and not (counts + steps >= limits).any():
            limits = None  # no set runs out on this stretch
        samples = begin.astype(np.float64)[:, None]
        for step in range(steps):
            np.multiply(weights, np.maximum(samples, 1.0), out=errors)
            errors -= counts
            if limits is not None:
                errors[counts >= limits] = -np.inf
            chosen = errors.argmax(axis=1)
            if record:
                picks[step] = chosen
            chosen += rows
            given[chosen] += 1.0
            samples += 1.0
        return counts, picks

    def _likely_counts(self, totals: Indices) -> _Counts:
        """A guess at what each set has given after each of `totals` samples: its share, the largest rests rounded up."""
        shares = self.weights * totals[:, None]
        counts = np.floor(shares)
        missing = totals - counts.sum(axis=1)
        rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1, kind="stable")
        counts += rank < missing[:, None]
        return counts if self._limits is None else np.minimum(counts, self._limits)

"""Find the duplicates among all documents of a job, in pieces that any process or machine can do.

Each part keeps its documents' keys sorted (`PART.marks`). A range of one table's keys is then a slice of every part, so memory does
not grow with the number of documents: `CANDIDATES` keys are compared at a time. Pairs that share a key go to files, sorted by
their first document; those are read back in ranges of documents, confirmed by sketches, and only confirmed pairs are joined.
A document is number `first document of its part + its place in the part`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from argosy.data.curate.array_file import Array, read_arrays, write_arrays
from argosy.data.curate.document_marks import ComparingStep, Marks, jaccard, ragged
from argosy.data.curate.word_sequence import Hashes, Integers
from argosy.errors import ArgosyError
from argosy.files import replace_file

# Keys of one table that are compared at a time, at 60 bytes each if few are equal, and at most 289.
CANDIDATES = 8 << 20
# Values of one side's sketches that are compared at a time, at about 80 bytes each.
SKETCHED = 16 << 20
# A pair of documents is one integer of 64 bits.
MOST_DOCUMENTS = 1 << 32
# A document is a candidate with the first document of its key, and with this many before it.
_NEIGHBOURS = 8
_LOW = np.uint64(0xFFFFFFFF)


def marks_path(directory: Path, part: str) -> Path:
    return directory / f"{part}.marks"


def write_marks(directory: Path, part: str, marks: list[Marks]) -> None:
    """Write the marks of a part, one for each comparing step, with the keys of each table sorted."""
    arrays: dict[str, Array] = {}
    for step, mark in enumerate(marks):
        for table, keys in enumerate(mark.keys):
            order = np.argsort(keys, kind="stable")
            order = order[int(np.count_nonzero(keys == 0)) :]
            arrays[f"{step}.{table}.keys"], arrays[f"{step}.{table}.documents"] = keys[order], order.astype(np.uint32)
        if mark.sketch_sizes is not None and mark.sketch_values is not None:
            arrays[f"{step}.sizes"], arrays[f"{step}.values"] = mark.sketch_sizes, mark.sketch_values
    write_arrays(marks_path(directory, part), arrays)


@dataclass(frozen=True)
class JobParts:
    """The parts of a job with their numbers of documents, in order."""

    names: tuple[str, ...]
    documents: tuple[int, ...]

    @property
    def firsts(self) -> Integers:
        """The first document of each part, and the end."""
        return np.concatenate(([0], np.cumsum(self.documents, dtype=np.int64)))

    def write(self, directory: Path) -> None:
        replace_file(directory / "part-list", orjson.dumps([self.names, self.documents]), sync=True)


@lru_cache(maxsize=2)
def job_parts(directory: Path) -> JobParts:
    """Read the list of parts."""
    names, documents = orjson.loads((directory / "part-list").read_bytes())
    return JobParts(tuple(names), tuple(documents))


@lru_cache(maxsize=512)
def _marks(directory: Path, part: str) -> dict[str, Array]:
    return read_arrays(marks_path(directory, part))


def forget_parts() -> None:
    """Forget what was read of parts: another job of this process may have made others at the same paths."""
    job_parts.cache_clear()
    _marks.cache_clear()


def candidates_path(directory: Path, step: int, table: int, part: int) -> Path:
    """Return the path of the candidates of one range of one table's keys."""
    return directory / f"pairs-{step}-{table:03d}-{part:05d}"


@dataclass(frozen=True)
class FindCandidates:
    """Find the pairs of documents that share a key of one table, in one range of keys."""

    directory: Path
    step: int
    table: int
    range: int
    ranges: int
    # True if equal keys prove a pair.
    certain: bool

    @property
    def path(self) -> Path:
        return candidates_path(self.directory, self.step, self.table, self.range)

    def run(self) -> None:
        if self.path.exists():
            return
        parts = job_parts(self.directory)
        limits = [(number << 64) // self.ranges for number in (self.range, self.range + 1)]
        keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
        for part, first in zip(parts.names, parts.firsts, strict=False):
            arrays = _marks(self.directory, part)
            of_part = arrays[f"{self.step}.{self.table}.keys"]
            low = np.searchsorted(of_part, np.uint64(limits[0]))
            high = len(of_part) if self.range + 1 == self.ranges else np.searchsorted(of_part, np.uint64(limits[1]))
            keys.append(of_part[low:high])
            documents.append(
                arrays[f"{self.step}.{self.table}.documents"][low:high].astype(np.uint64) + np.uint64(first)
            )
        pairs = pairs_of(np.concatenate(keys), np.concatenate(documents), 0 if self.certain else _NEIGHBOURS)
        replace_file(self.path, pairs.tobytes(), sync=True)


def pairs_of(keys: Hashes, documents: Hashes, neighbours: int) -> Hashes:
    """Return the pairs of documents with equal keys, sorted, each as first * 2**32 + second with first < second."""
    order = np.argsort(keys, kind="stable")
    keys, documents = keys[order], documents[order]
    begins = np.ones(len(keys), np.bool_)
    begins[1:] = keys[1:] != keys[:-1]
    firsts = documents[begins][np.cumsum(begins) - 1] if len(keys) else documents
    found = [(firsts[~begins] << np.uint64(32)) | documents[~begins]]
    for lag in range(1, neighbours + 1):
        same = keys[lag:] == keys[:-lag]
        if not same.any():
            break
        found.append((documents[:-lag][same] << np.uint64(32)) | documents[lag:][same])
    return np.unique(np.concatenate(found))


@dataclass(frozen=True)
class ConfirmPairs:
    """Compare the sketches of candidates whose first document is in one range of documents."""

    directory: Path
    step: int
    range: int
    ranges: int
    threshold: float
    sketch: int
    # Tables of the step's keys, each of which has candidates in as many ranges.
    tables: int

    @property
    def path(self) -> Path:
        return self.directory / f"confirmed-{self.step}-{self.range:05d}"

    def run(self) -> None:
        if self.path.exists():
            return
        count = int(job_parts(self.directory).firsts[-1])
        low, high = (np.uint64(number * count // self.ranges << 32) for number in (self.range, self.range + 1))
        slices = [np.zeros(0, np.uint64)]
        for table, part in itertools.product(range(self.tables), range(self.ranges)):
            pairs = _read_pairs(candidates_path(self.directory, self.step, table, part))
            slices.append(pairs[np.searchsorted(pairs, low) : np.searchsorted(pairs, high)])
        pairs = np.unique(np.concatenate(slices))
        confirmed = [pairs[:0]]
        size = max(1, SKETCHED // self.sketch)
        for at in range(0, len(pairs), size):
            chunk = pairs[at : at + size]
            confirmed.append(chunk[self._similarity(chunk) >= self.threshold])
        replace_file(self.path, np.concatenate(confirmed).tobytes(), sync=True)

    def _similarity(self, pairs: Hashes) -> npt.NDArray[np.float64]:
        sides = np.stack((pairs >> np.uint64(32), pairs & _LOW), axis=1).astype(np.int64)
        documents = np.unique(sides)
        sizes, values = self._sketches(documents)
        return jaccard(np.searchsorted(documents, sides), sizes, values, self.sketch)

    def _sketches(self, documents: Integers) -> tuple[Integers, npt.NDArray[np.uint32]]:
        parts = job_parts(self.directory)
        firsts = parts.firsts
        of_part = np.searchsorted(firsts, documents, side="right") - 1
        sizes, values = [], []
        for number in np.unique(of_part):
            arrays = _marks(self.directory, parts.names[number])
            within = documents[of_part == number] - firsts[number]
            of_sketches = arrays[f"{self.step}.sizes"]
            starts = (np.cumsum(of_sketches) - of_sketches)[within]
            sizes.append(of_sketches[within])
            values.append(ragged(arrays[f"{self.step}.values"], starts, of_sketches[within]))
        return np.concatenate(sizes), np.concatenate(values)


def _read_pairs(path: Path) -> Hashes:
    return np.memmap(path, "<u8", "r") if path.stat().st_size else np.zeros(0, np.uint64)


SearchTask = FindCandidates | ConfirmPairs


def searches(directory: Path, steps: list[ComparingStep]) -> Iterator[list[SearchTask]]:
    """Yield two lists of work, the second of which needs the results of the first."""
    count = int(job_parts(directory).firsts[-1])
    if steps and count >= MOST_DOCUMENTS:
        raise ArgosyError(
            "data.bad-input",
            f"{count:,} documents cannot be compared with each other: at most {MOST_DOCUMENTS - 1:,} can",
            fix="curate the inputs in several jobs, or with steps that remove more before documents are compared",
        )
    ranges = -(-count // CANDIDATES) or 1
    yield [
        FindCandidates(directory, number, table, part, ranges, certain=not step.similarity)
        for number, step in enumerate(steps)
        for table in range(step.tables)
        for part in range(ranges)
    ]
    yield [
        ConfirmPairs(directory, number, part, ranges, step.similarity, step.sketch_size, step.tables)
        for number, step in enumerate(steps)
        for part in range(ranges)
        if step.similarity
    ]


@dataclass(frozen=True)
class Duplicates:
    """The documents that are removed, in order: the comparing step that removed each, and the document that is kept instead."""

    documents: Integers
    step: npt.NDArray[np.uint8]
    kept: Integers


def decide(directory: Path, steps: list[ComparingStep]) -> Duplicates:
    """Return the duplicates: all but the first of each set of connected documents. The first step that finds one removes it."""
    # A step that confirms its candidates counts by the confirmed pairs alone.
    listed = [task for phase in searches(directory, steps) for task in phase]
    tasks = [task for task in listed if isinstance(task, ConfirmPairs) or task.certain]
    by_step = [
        np.concatenate([np.zeros(0, np.uint64), *(_read_pairs(task.path) for task in tasks if task.step == number)])
        for number in range(len(steps))
    ]
    pairs = np.concatenate(by_step) if by_step else np.zeros(0, np.uint64)
    first, second = (pairs >> np.uint64(32)).astype(np.int64), (pairs & _LOW).astype(np.int64)
    members, places = np.unique(np.concatenate((first, second)), return_inverse=True)
    label = connected(len(members), places[: len(first)], places[len(first) :])
    removed = label != np.arange(len(members))
    step = np.full(len(members), max(0, len(steps) - 1), np.uint8)
    for number in reversed(range(len(steps))):
        found = np.unique(by_step[number] & _LOW).astype(np.int64)
        step[np.searchsorted(members, found)] = number
    return Duplicates(members[removed], step[removed], members[label[removed]])


def connected(count: int, first: Integers, second: Integers) -> Integers:
    """Return for each of `count` nodes the smallest node that edges connect it with."""
    label = np.arange(count)
    while True:
        smaller = np.minimum(label[first], label[second])
        before = label.copy()
        np.minimum.at(label, first, smaller)
        np.minimum.at(label, second, smaller)
        label = label[label]
        if np.array_equal(before, label):
            return label

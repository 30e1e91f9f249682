"""What is kept of each document to compare it with all others: keys that candidates share, and a sketch to confirm them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import Hashes

Sketch = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Marks:
    """The marks of some documents.

    Args:
        keys: One row for each table, one column for each document. Documents with equal keys in a table are candidates; 0 is no key.
        sketch_sizes: The number of values in each document's sketch. None: equal keys are proof.
        sketch_values: The sketches back to back.
    """

    keys: Hashes
    sketch_sizes: npt.NDArray[np.int64] | None = None
    sketch_values: Sketch | None = None


class ComparingStep(CurationStep):
    """The base of steps that compare documents with each other."""

    compares_documents: ClassVar[bool] = True

    @property
    def similarity(self) -> float:
        """The Jaccard similarity of sketches that confirms a pair. 0: equal keys are proof."""
        return 0.0

    @property
    def sketch_size(self) -> int:
        """The largest number of values in a sketch."""
        return 0

    @property
    def tables(self) -> int:
        """The number of tables of keys."""
        return 1

    def mark(self, batch: TextBatch) -> Marks:
        """Return the marks of the living documents of a batch."""
        raise NotImplementedError

    def apply(self, batch: TextBatch) -> StepResult:
        raise TypeError("documents are compared after all batches")


def ragged(values: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Sketch:
    """Return values[starts[i] : starts[i] + sizes[i]] for each i, back to back."""
    ends = np.cumsum(sizes)
    places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
    found: Sketch = values[places]
    return found


def jaccard(
    pairs: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], values: Sketch, most: int
) -> npt.NDArray[np.float64]:
    """Return the Jaccard similarity of pairs of sketches.

    A sketch holds the `most` smallest hashes of a document's n-grams. If both documents have no more than that, the similarity is
    exact; else it is estimated from the `most` smallest hashes of both together.

    Args:
        pairs: The numbers of two sketches in each row.
        sizes: The number of values of each sketch.
        values: The sketches back to back.
        most: The largest size of a sketch.
    """
    starts = np.cumsum(sizes) - sizes
    sides = [
        ragged(values, starts[side], sizes[side]).astype(np.uint64)
        | np.repeat(np.arange(len(pairs), dtype=np.uint64) << np.uint64(32), sizes[side])
        for side in (pairs[:, 0], pairs[:, 1])
    ]
    both = np.sort(np.concatenate(sides))
    in_both = np.zeros(len(both), np.bool_)
    in_both[:-1] = both[1:] == both[:-1]
    distinct = np.ones(len(both), np.bool_)
    distinct[1:] = ~in_both[:-1]
    both, in_both = both[distinct], in_both[distinct]
    of_pair = (both >> np.uint64(32)).astype(np.int64)
    union = np.bincount(of_pair, minlength=len(pairs))
    rank = np.arange(len(both)) - np.repeat(np.cumsum(union) - union, union)
    whole = (sizes[pairs[:, 0]] < most) & (sizes[pairs[:, 1]] < most)
    used = whole[of_pair] | (rank < most)
    common = np.bincount(of_pair[used & in_both], minlength=len(pairs))
    return common / np.maximum(np.bincount(of_pair[used], minlength=len(pairs)), 1)


def joined_marks(marks: Sequence[Marks], tables: int) -> Marks:
    """Return the marks of several batches as one."""
    keys = np.concatenate([np.zeros((tables, 0), np.uint64), *(mark.keys for mark in marks)], axis=1)
    sizes = [mark.sketch_sizes for mark in marks if mark.sketch_sizes is not None]
    values = [mark.sketch_values for mark in marks if mark.sketch_values is not None]
    if not sizes:
        return Marks(keys)
    return Marks(keys, np.concatenate(sizes), np.concatenate(values))

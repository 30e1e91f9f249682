"""The shuffled order of samples, as pure functions of a seed and a sample index. No index is built or stored.

`permute` is a keyed bijection of 0..n-1: a Feistel network over the next power of four, with cycle walking until the result
is below n. `Blend` maps a sample index to a corpus so that after any number of samples each corpus has had its share to
within one sample (Webster's apportionment). Memory does not grow with the number of samples, the order does not depend on
world size, and a run resumes from one integer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from argosy.config.seeds import derive_seed

Indices = npt.NDArray[np.int64]
_ROUNDS = 6
_BLOCK = 1024


def permute(indices: Indices, n: int, key: int) -> Indices:
    """Return the image of each index under a pseudorandom permutation of 0..n-1 that `key` chooses."""
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [np.uint64(derive_seed(key, "feistel", r)) for r in range(_ROUNDS)]
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        walked = values[outside]
        left, right = walked >> half_bits, walked & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


def epoch_order(indices: Indices, count: int, seed: int) -> Indices:
    """Return which of `count` items each sample index visits: every epoch visits each once, in an order of its own."""
    epochs, places = np.divmod(indices, count)
    items = np.empty(len(indices), np.int64)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        items[mine] = permute(places[mine], count, derive_seed(seed, "order", epoch))
    return items


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Blend:
    """A map from a sample index to (corpus, number of earlier samples from that corpus).

    It is thread-safe: when a run rewinds, a loader thread that hangs in a read is abandoned and may later continue beside the
    new one.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = np.asarray(weights, np.float64) / np.sum(weights)
        # The block computed last: (its number, corpus of each sample, index of each sample in its corpus).
        self._filled: tuple[int, Indices, Indices] = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return (corpus, index within the samples of that corpus) of each sample index."""
        if len(self.weights) == 1:
            return np.zeros(len(indices), np.int64), indices
        corpus, local = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        for block in np.unique(indices // _BLOCK):
            filled = self._filled
            if block != filled[0]:
                filled = self._filled = (int(block), *self._fill(int(block)))
            here = indices // _BLOCK == block
            corpus[here], local[here] = (part[indices[here] % _BLOCK] for part in filled[1:])
        return corpus, local

    def _fill(self, block: int) -> tuple[Indices, Indices]:
        """Compute one block sample by sample: the next sample comes from the corpus furthest behind its share."""
        given = apportion(self.weights, block * _BLOCK)
        corpus, local = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
        for i in range(_BLOCK):
            turn = int(np.argmin((given + 0.5) / self.weights))
            corpus[i], local[i] = turn, given[turn]
            given[turn] += 1
        return corpus, local


def apportion(weights: npt.NDArray[np.float64], total: int) -> Indices:
    """Return how many of the first `total` samples come from each corpus, without counting them one by one.

    Samples are drawn in the order of (count + 1/2) / weight. All samples below a threshold are counted at once. The threshold
    is low enough to leave a few samples, which are counted one by one.
    """
    threshold = max(0.0, total - len(weights) / 2 - 1)
    given = np.maximum(np.ceil(threshold * weights - 0.5), 0).astype(np.int64)
    for _ in range(total - int(given.sum())):
        given[int(np.argmin((given + 0.5) / weights))] += 1
    return given

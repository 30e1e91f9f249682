"""Megatron-core's BlendedDataset order, bit for bit.

Megatron draws each sample from the set furthest behind its share. That recurrence has no closed form, but it soon forgets its
start. So many segments ("lanes") of it are simulated in parallel from guessed starting counts. A lane whose guess was wrong,
because the lane before it ended with other counts, is simulated again until all lanes agree. Memory holds the counts at every
65,536th sample and the window in use.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from argosy.data.samples.order import Indices
from argosy.errors import ArgosyError

# Whole numbers, as float64 because Megatron compares doubles.
_Counts = npt.NDArray[np.float64]  # [lane, set]
# Megatron builds this fraction of samples more than the share of a set.
SURPLUS = 0.005
# Blended samples between two checkpoints of the counts.
_WINDOW = 1 << 16
# Samples per lane when computing checkpoints.
_LANE = 1 << 10
# Samples per lane inside a window, where there are fewer lanes.
_WINDOW_LANE = 1 << 8
# The largest number of parallel lanes.
_LANES = 1 << 13
# Megatron stores the set number in 16 bits.
_MOST_SETS = 32766


@dataclass(frozen=True)
class BlendPlan:
    """The sizes that Megatron's BlendedMegatronDatasetBuilder derives from weights and a number of samples."""

    # Normalised once; MegatronBlend normalises again, as Megatron does.
    weights: list[float]
    # The samples to build of each set: its share plus a margin.
    num_samples: list[int]
    # The size of the blend: the sum of all shares, each rounded up.
    size: int


def plan_blend(weights: Sequence[float], size: int, surplus: float = SURPLUS) -> BlendPlan:
    """Plan a blend by user weights: MegatronSamples with `num_samples[d]` of each set d, blended by MegatronBlend(weights, size).

    Without weights Megatron builds one epoch of each set (`num_samples` None) and blends by their sample counts:
    MegatronBlend(counts, min(size, sum(counts))), or MegatronBlend(counts, None) to draw every sample once. A single set
    without a weight is not blended: MegatronSamples with `num_samples` = size, without a margin.
    """
    _check_weights(weights)
    normalised = normalise(weights)
    targets = [math.ceil(size * weight) for weight in normalised]
    return BlendPlan(normalised, [math.ceil(target * (1 + surplus)) for target in targets], sum(targets))


def normalise(weights: Sequence[float]) -> list[float]:
    """Divide the weights by their sum with numpy's summation, whose rounding Megatron's results depend on."""
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
    """A map from the index in a BlendedDataset to (set, sample of that set). It is thread-safe."""

    def __init__(self, weights: Sequence[float], size: int | None) -> None:
        """Blend `size` samples in proportion to the weights. With None, draw exactly weights[d] samples of each set d."""
        _check_weights(weights)
        self._limits: _Counts | None = None
        self._size = sum(int(weight) for weight in weights) if size is None else size
        if size is None:
            self._limits = np.array(weights, np.float64)
            self.weights = self._limits / float(self._size)
        else:
            self.weights = np.array(normalise(weights))
        # The counts at each multiple of _WINDOW.
        self._checkpoints: list[_Counts] = [np.zeros(len(weights))]  # [set]
        self._counting = threading.Lock()
        self._window = -1
        self._set: Indices = np.zeros(0, np.int64)
        self._local: Indices = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._size

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return (set, sample of that set) of each index. Cheapest if indices are close to each other and to earlier ones."""
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self._size):
            raise IndexError(f"samples {int(indices.min())} to {int(indices.max())} of {self._size}")
        if len(self.weights) == 1:
            return np.zeros(len(indices), np.int64), indices
        sets, local = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        windows = indices // _WINDOW
        with self._counting:
            for window in np.unique(windows).tolist():
                if window != self._window:
                    self._fill(window)
                here = windows == window
                sets[here] = self._set[indices[here] % _WINDOW]
                local[here] = self._local[indices[here] % _WINDOW]
        return sets, local

    def counts(self, total: int) -> Indices:
        """Return how many of the first `total` samples come from each set."""
        window, rest = divmod(total, _WINDOW)
        with self._counting:
            self._reach(window)
        found = self._checkpoints[window].astype(np.int64)
        if rest:
            sets, _ = self.locate(np.arange(window * _WINDOW, total))
            found += np.bincount(sets, minlength=len(found))
        return found

    def refuse_oversampling(self, available: Sequence[int]) -> None:
        """Refuse a blend that draws more samples of a set than it has, as Megatron does after building the blend."""
        # A set is drawn from only when it is not ahead, so it is never more than one sample above its share. Most blends
        # therefore need no counting.
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
        # Past the last sample all sets are exhausted.
        samples = min(_WINDOW, self._size - first)
        _, picks = self._walk(before, first, -(-samples // _WINDOW_LANE), _WINDOW_LANE, record=True)
        picks = picks[:samples]
        by_set = np.argsort(picks, kind="stable")
        given = np.bincount(picks, minlength=len(before))
        first_of_set = np.cumsum(given) - given
        self._local = np.empty(samples, np.int64)
        self._local[by_set] = np.arange(samples) + np.repeat(before.astype(np.int64) - first_of_set, given)
        self._set, self._window = picks.astype(np.int64), window

    def _reach(self, window: int) -> None:
        """Compute checkpoints up to the start of `window`."""
        while len(self._checkpoints) <= window:
            known, per_window = len(self._checkpoints) - 1, _WINDOW // _LANE
            lanes = min(_LANES, (window - known) * per_window)
            starts, _ = self._walk(self._checkpoints[known], known * _WINDOW, lanes, _LANE, record=False)
            self._checkpoints.extend(starts[per_window::per_window].copy())

    def _walk(
        self, counts: _Counts, first: int, lanes: int, steps: int, *, record: bool
    ) -> tuple[_Counts, npt.NDArray[np.int16]]:
        """Simulate `lanes` x `steps` samples from sample `first` on, starting from `counts`.

        Returns the counts at the start of each lane and after the last one, and with `record` the set of each sample. Every
        round confirms at least one more lane. Nearly always all lanes are confirmed in the second or third round.
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
        """Return each lane's counts after `steps` samples, and the sets that were drawn, [step, lane].

        The error of a set is its share of the samples so far minus the samples drawn from it. The set with the largest error is
        next; ties go to the first set. Product and difference are rounded separately, as Megatron's are on x86 and as numpy's
        are on every machine. On ARM, Megatron's compiler fuses them into one multiply-add, which breaks ties differently.
        """
        picks = np.empty((steps if record else 0, len(begin)), np.int16)
        given, rows = counts.reshape(-1), np.arange(len(begin)) * counts.shape[1]
        weights = np.ascontiguousarray(np.broadcast_to(self.weights, counts.shape))
        errors = np.empty_like(counts)
        limits = self._limits
        # No set can be exhausted within these steps.
        if limits is not None and not (counts + steps >= limits).any():
            limits = None
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
        """Guess the counts after each of `totals` samples: shares rounded by largest remainder."""
        shares = self.weights * totals[:, None]
        counts = np.floor(shares)
        missing = totals - counts.sum(axis=1)
        rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1, kind="stable")
        counts += rank < missing[:, None]
        return counts if self._limits is None else np.minimum(counts, self._limits)

"""The global batch size of each step: constant, or ramped up (batch size warmup).

The batch size is a pure function of the samples consumed before the step, so a run resumed in the middle of a ramp needs no
extra state. This is the only module that converts steps to samples and back.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, isqrt
from typing import NamedTuple


class _Stage(NamedTuple):
    """A range of consecutive steps with the same batch size.

    `first_step` steps and `first_sample` samples come before it.
    """

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True)
class Batches:
    """The batch size schedule of a run.

    `rampup` is (batch size of the first step, increment, samples over which the size grows to `global_batch`). The size grows
    by one increment after each equal share of those samples, as with Megatron's --rampup-batch-size.
    """

    global_batch: int
    rampup: tuple[int, int, int] | None = None

    def size(self, consumed_samples: int) -> int:
        """Return the batch size of the step that starts after `consumed_samples` samples."""
        if self.rampup is None:
            return self.global_batch
        start, increment, samples = self.rampup
        return min(self.global_batch, start + consumed_samples * self._increments // samples * increment)

    def samples(self, steps: int) -> int:
        """Number of samples consumed by the first `steps` steps."""
        stage = self._stages[bisect_right(self._stages, steps, key=lambda s: s.first_step) - 1]
        return stage.first_sample + (steps - stage.first_step) * stage.size

    def steps(self, samples: int) -> int:
        """Number of steps needed to consume `samples` samples, rounded up."""
        later = bisect_right(self._stages, samples - 1, key=lambda s: s.first_sample)
        stage = self._stages[max(0, later - 1)]
        return stage.first_step + -((stage.first_sample - samples) // stage.size)

    def steps_before(self, end: int, samples: int) -> int:
        """Number of final steps of a run of `end` steps that consume `samples` samples, rounded up.

        The result is larger than `end` if the whole run consumes fewer samples.
        """
        total = self.samples(end)
        if samples > total:
            return end + self.steps(samples - total)
        begin = self.steps(total - samples)
        return end - (begin if self.samples(begin) == total - samples else begin - 1)

    def describe(self, seq_len: int) -> str:
        """Describe the tokens in a step, with those of the first step if the batch ramps up."""
        full = f"{self.global_batch * seq_len:,} tokens each"
        if len(self._stages) == 1:
            return full
        first = f"{self._stages[0].size * seq_len:,} tokens at first"
        return f"{first}, growing, and from step {self._stages[-1].first_step + 1} on {full}"

    @property
    def divisor(self) -> int:
        """The largest number of samples that divides every batch of the run."""
        return gcd(self.global_batch, *(self.rampup or ())[:2])

    @property
    def sizes(self) -> list[int]:
        """All batch sizes of the run, each once, smallest first."""
        return [stage.size for stage in self._stages]

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Pairs (samples consumed before, batch size), one for each range of steps with the same batch size."""
        return [(stage.first_sample, stage.size) for stage in self._stages]

    @property
    def _increments(self) -> int:
        start, increment, _ = self.rampup or (self.global_batch, 1, 1)
        return (self.global_batch - start) // increment

    @cached_property
    def _stages(self) -> list[_Stage]:
        stages: list[_Stage] = []
        start, increment, samples = self.rampup or (self.global_batch, 1, 1)
        step = sample = 0
        for level in range(self._increments):
            size, end = start + level * increment, -(-(level + 1) * samples // self._increments)
            # Zero if the last step of the level before went past the end of this level.
            steps = max(0, -((sample - end) // size))
            if steps:
                stages.append(_Stage(step, sample, size))
            step, sample = step + steps, sample + steps * size
        return [*stages, _Stage(step, sample, self.global_batch)]


@lru_cache
def divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    """Return the divisors of a whole number above 0, smallest first; with `most`, those up to it.

    The time grows with the square root of the number, and at most with `most`.
    """
    root = isqrt(number)
    small = [n for n in range(1, min(root, most or root) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return tuple(n for n in (*small, *large) if most is None or n <= most)

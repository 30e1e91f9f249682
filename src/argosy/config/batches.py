"""How many samples each step takes: always the same number, or fewer at first.

The size of a step is a function of the samples consumed before it, so that a run resumed in the middle of a ramp needs
no state for it. Steps and samples are turned into each other here, and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class _Stage(NamedTuple):
    """Steps of one size."""

    first_step: int  # steps done before it
    first_sample: int  # samples consumed before it
    size: int


@dataclass(frozen=True)
class Batches:
    """`rampup`, where there is one: (size of the first step, increment, samples over which the size grows to
    `global_batch`, in equal shares of them)."""

    global_batch: int
    rampup: tuple[int, int, int] | None = None

    def size(self, consumed_samples: int) -> int:
        """Samples in the step after that many."""
        if self.rampup is None:
            return self.global_batch
        start, increment, samples = self.rampup
        return min(self.global_batch, start + consumed_samples * self._increments // samples * increment)

    def samples(self, steps: int) -> int:
        """Consumed by the first `steps` steps."""
        stage = self._stages[bisect_right(self._stages, steps, key=lambda s: s.first_step) - 1]
        return stage.first_sample + (steps - stage.first_step) * stage.size

    def steps(self, samples: int) -> int:
        """That consume so many samples, rounded up."""
        later = bisect_right(self._stages, samples - 1, key=lambda s: s.first_sample)
        stage = self._stages[max(0, later - 1)]
        return stage.first_step + -((stage.first_sample - samples) // stage.size)

    def steps_before(self, end: int, samples: int) -> int:
        """The last of `end` steps that consume so many samples, rounded up; more than `end` where they do not."""
        total = self.samples(end)
        if samples > total:
            return end + self.steps(samples - total)
        begin = self.steps(total - samples)
        return end - (begin if self.samples(begin) == total - samples else begin - 1)

    def describe(self, seq_len: int) -> str:
        """Tokens in a step, and how many at first where the batch grows."""
        full = f"{self.global_batch * seq_len:,} tokens each"
        if len(self._stages) == 1:
            return full
        first = f"{self._stages[0].size * seq_len:,} tokens at first"
        return f"{first}, growing, and from step {self._stages[-1].first_step + 1} on {full}"

    @property
    def sizes(self) -> list[int]:
        """Of all steps, each once, smallest first."""
        return [stage.size for stage in self._stages]

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(samples consumed before, size) of each stage of steps of one size."""
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
            steps = max(0, -((sample - end) // size))  # none where the step before went past this level
            if steps:
                stages.append(_Stage(step, sample, size))
            step, sample = step + steps, sample + steps * size
        return [*stages, _Stage(step, sample, self.global_batch)]

"""The guard, which skips steps whose loss or gradient norm is NaN, infinite or a spike that no healthy run has, and loss scaling.

Gradient norms of healthy runs are heavy-tailed: one rare document in a batch of one gives 100 times the median norm, and a loss far
above that of guessing. Clipping bounds what such a step can do. So by default the guard compares with the extremes of the run, not
with its mean, and only once `window` steps are known:

- A gradient norm 1,000 times the largest the run has ever had is a fault by itself: a flipped bit, a loss scale left in.
- A norm twice the largest of the last `window` steps is a fault if the loss is high too: a mean over at least 8 samples that is 1.25
  times the highest loss the run has ever had, and 1.25 times that of guessing, log(vocabulary). The batch as a whole is then
  predicted worse than by guessing, which samples drawn at random from a blend do not do together: a corrupted batch, wrong
  labels, broken weights.

Such a spike enters neither window nor extremes: the next step has the same limits, and after `skips` in a row the run is rewound.

`guard.sigma` selects a stricter rule instead: loss or norm more than `sigma` standard deviations above the mean of the window, and
more than `sigma` percent. With this rule a spike enters the window clipped to the limit: one spike cannot blind the guard, and a
level that has really changed is accepted after a few steps.

The guard computes on the device, from numbers that are the same on every rank. A skipped update changes nothing, and the host
learns of it when a step is logged. Window and extremes are part of a checkpoint, so that a resumed run decides as one that never
stopped.

`LossScaler` is dynamic loss scaling for fp16, whose smallest number is 6e-8 and whose largest is 65,504. The loss is multiplied by
a large scale so that gradients do not underflow, and the scale adapts to the gradients. A step whose gradients overflow is
skipped. From the overflow number `HYSTERESIS` on, each one also halves the scale. After `INTERVAL` good steps in a row the scale is
doubled, and the hysteresis is restored. A scale below `MINIMUM` means that the scale is not the cause of the overflow: the guard
then judges the step, and without a guard the run stops. The scaler too computes on the device: the host learns of a skipped step
when the step is logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.config.survival import GuardSpec

# Multiples of the highest loss of the run, of the largest norm of the window, and of the largest norm of the run.
HIGH_LOSS, HIGH_NORM, ABSURD_NORM = 1.25, 2.0, 1000.0
# Fewest samples in a step for its loss to count: one rare document among them cannot bring the mean above the limit.
FEWEST_SAMPLES = 8
# With `sigma`: a standard deviation counts as at least this share of the mean.
_FLOOR = 0.01
# Skipped steps kept on the device until the host reads them.
_REMEMBERED = 64


class Skipped(NamedTuple):
    """A skipped step, and the limits that it was compared with."""

    step: int
    loss: float
    grad_norm: float
    loss_limit: float
    norm_limit: float

    @property
    def reason(self) -> str:
        return "spike" if math.isfinite(self.loss) and math.isfinite(self.grad_norm) else "non-finite"

    @property
    def cause(self) -> str:
        """The numbers that led to the skip, as text."""
        if self.reason == "non-finite":
            return f"the loss is {self.loss:.5g} and the gradient norm {self.grad_norm:.5g}"
        pairs = ("loss", self.loss, self.loss_limit), ("gradient norm", self.grad_norm, self.norm_limit)
        above = [f"{name} {value:.5g} is above the limit {limit:.5g}" for name, value, limit in pairs if value > limit]
        beside = [f"{name} is {value:.5g}" for name, value, limit in pairs if value <= limit]
        return " and ".join(above + beside)


class Guard:
    """The rule that skips steps with a bad loss or gradient norm, computed on the device."""

    def __init__(self, spec: GuardSpec, device: torch.device, *, guessing: float = 0.0) -> None:
        """`guessing` is the loss of a model that knows nothing, log(vocabulary)."""
        self.spec, self._guessing = spec, guessing
        # Loss and gradient norm of the last steps. [2, window]
        self._window = torch.zeros(2, spec.window, device=device)
        # The highest loss and gradient norm of all steps that were not skipped.
        self._highest = torch.zeros(2, device=device)
        self._places = torch.arange(spec.window, device=device)
        self._entered = torch.zeros((), dtype=torch.int64, device=device)
        # The current number of skipped steps in a row, and the total.
        self._streak = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._remembered = torch.zeros(_REMEMBERED, 5, dtype=torch.float64, device=device)
        # The number of skipped steps that the host has reported.
        self._told = 0
        self.rewinds = 0
        # (samples consumed before, samples passed over)
        self.passed: list[tuple[int, int]] = []

    def judge(self, step: int, loss: Tensor, norm: Tensor, excused: Tensor, samples: int) -> Tensor:
        """Return 1 if the step is to be skipped, else 0, as a tensor.

        `excused`: the loss scaler handles the step, and it does not enter the window. `samples`: number of samples in the step.
        """
        values = torch.stack([loss.float(), norm.float()])
        sigma = self.spec.sigma
        limits = self._limits_by_extremes(values, samples) if sigma is None else self._limits_by_deviation(sigma)
        limits = torch.where(self._entered >= self.spec.window, limits, torch.inf)
        above, finite = values > limits, values.isfinite().all()
        spike = above[1] if sigma is None else above.any()
        bad = ~(finite & ~spike) & ~excused

        usual = finite & ~excused & (~spike if sigma is None else True)
        entering = values if sigma is None else torch.minimum(values, limits)
        enters = (self._places == self._entered % self.spec.window) & usual
        self._window = torch.where(enters, entering[:, None], self._window)
        self._highest = torch.where(usual, torch.maximum(entering, self._highest), self._highest)
        self._entered += usual
        self._streak = torch.where(bad, self._streak + 1, torch.where(excused, self._streak, 0))
        row = torch.cat([torch.full_like(values[:1], step), values, limits]).double()
        here = (self._skipped % _REMEMBERED == torch.arange(_REMEMBERED, device=row.device)) & bad
        self._remembered = torch.where(here[:, None], row, self._remembered)
        self._skipped += bad
        return bad.float()

    def _limits_by_extremes(self, values: Tensor, samples: int) -> Tensor:
        """Return the limits of loss and norm. Only the norm decides; its limit is lower if the loss is above its own limit."""
        alone = ABSURD_NORM * self._highest[1]
        if samples < FEWEST_SAMPLES:
            limits = torch.stack([torch.full_like(alone, torch.inf), alone])
        else:
            loss = HIGH_LOSS * self._highest[0].clamp(min=self._guessing)
            together = HIGH_NORM * self._window[1].amax()
            limits = torch.stack([loss, torch.where(values[0] > loss, together, alone)])
        # A limit of 0 comes from steps without any gradient, and is no limit.
        return torch.where(limits > 0, limits, torch.inf)

    def _limits_by_deviation(self, sigma: float) -> Tensor:
        mean = self._window.mean(1)
        return mean + sigma * torch.maximum(self._window.std(1, correction=0), _FLOOR * mean.abs())

    def report(self) -> tuple[list[Skipped], int]:
        """Return the steps skipped since the last report, at most the newest 64, and the current number in a row. Waits for the
        device."""
        skipped, streak = int(self._skipped), int(self._streak)
        rows = self._remembered.tolist() if skipped > self._told else []
        first = max(self._told, skipped - _REMEMBERED)
        self._told = skipped
        found = [Skipped(int(row[0]), *row[1:]) for row in (rows[n % _REMEMBERED] for n in range(first, skipped))]
        return found, streak

    def position(self, consumed_samples: int) -> int:
        """Return the position of the next sample in the stream: the samples that were passed over count too."""
        return consumed_samples + sum(count for at, count in self.passed if at <= consumed_samples)

    def rewound(self, rewinds: int, passed: list[tuple[int, int]], skipped: int) -> None:
        """Restore, after a rewind has loaded an older checkpoint, the counts that the checkpoint does not know."""
        self.rewinds, self.passed, self._told = rewinds, passed, skipped
        self._skipped.fill_(skipped)
        self._streak.zero_()

    @property
    def skipped(self) -> int:
        """The total number of skipped steps. Waits for the device."""
        return int(self._skipped)

    def numbers(self) -> dict[str, float]:
        """Return the whole state, read from the device."""
        found = {
            "guard/window": float(self.spec.window),
            "guard/entered": float(self._entered),
            "guard/streak": float(self._streak),
            "guard/skipped": float(self._skipped),
            "guard/rewinds": float(self.rewinds),
            "guard/highest/loss": float(self._highest[0]),
            "guard/highest/norm": float(self._highest[1]),
        }
        for n, (at, count) in enumerate(self.passed):
            found |= {f"guard/passed/{n}/at": float(at), f"guard/passed/{n}/count": float(count)}
        for kind, row in zip(("loss", "norm"), self._window.tolist(), strict=True):
            found |= {f"guard/{kind}/{n}": value for n, value in enumerate(row[: int(self._entered)])}
        return found

    def load(self, numbers: Mapping[str, float]) -> None:
        """Load the state. A run that had no guard so far, or another window, starts from an empty one."""
        for tensor in (self._window, self._highest, self._entered, self._streak, self._skipped):
            tensor.zero_()
        if numbers.get("guard/window") == self.spec.window:
            self._entered.fill_(int(numbers["guard/entered"]))
            self._streak.fill_(int(numbers["guard/streak"]))
            self._skipped.fill_(int(numbers["guard/skipped"]))
            held = min(int(self._entered), self.spec.window)
            rows = [[numbers[f"guard/{kind}/{n}"] for n in range(held)] for kind in ("loss", "norm")]
            self._window[:, :held] = torch.tensor(rows)
            # An older checkpoint has the window but not the extremes.
            self._highest.copy_(self._window.amax(1))
            for n, kind in enumerate(("loss", "norm")):
                self._highest[n] = numbers.get(f"guard/highest/{kind}", float(self._highest[n]))
        self.rewinds = int(numbers.get("guard/rewinds", 0))
        self.passed = []
        while (at := numbers.get(f"guard/passed/{len(self.passed)}/at")) is not None:
            self.passed.append((int(at), int(numbers[f"guard/passed/{len(self.passed)}/count"])))
        self._told = int(self._skipped)


# Scales of the mean loss over tokens.
INITIAL, MINIMUM = 2.0**16, 1.0
FACTOR, INTERVAL, HYSTERESIS = 2.0, 1000, 2


class LossScaler:
    """Dynamic loss scaling for fp16, computed on the device."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        # Steps in a row without overflow.
        self._good = torch.zeros((), device=device)
        # Overflows until the scale is lowered.
        self._patience = torch.full((), float(HYSTERESIS), device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step. `overflow` is 1 if the step was skipped, else 0."""
        bad = overflow > 0
        self._good = torch.where(bad, 0.0, self._good + 1)
        self._patience = torch.where(bad, self._patience - 1, self._patience)
        lower, higher = bad & (self._patience <= 0), self._good == INTERVAL
        factor = torch.where(lower, 1 / FACTOR, torch.where(higher, FACTOR, 1.0))
        self.scale = self.scale * factor
        self._patience = torch.where(higher, float(HYSTERESIS), self._patience)
        self._good = torch.where(higher, 0.0, self._good)

    def numbers(self) -> dict[str, float]:
        """Return the whole state, read from the device."""
        return {"loss_scale": float(self.scale), "good_steps": float(self._good), "patience": float(self._patience)}

    def load(self, numbers: Mapping[str, float]) -> None:
        """Load the state. A run that is rewound to its start, or used another precision so far, gets the initial state."""
        self.scale.fill_(numbers.get("loss_scale", INITIAL))
        self._good.fill_(numbers.get("good_steps", 0.0))
        self._patience.fill_(numbers.get("patience", HYSTERESIS))

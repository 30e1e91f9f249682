"""Steps whose numbers are not to be trusted are skipped: a NaN or an infinity, or a loss or gradient norm far above the usual.

Usual is what the last `window` steps had: a spike lies more than `sigma` standard deviations above their mean, and more than
`sigma` percent, so that a run whose loss hardly moves is not taken for one that jumps. A spike enters the window as if it had
been at the limit: one cannot blind the guard, and a level that has really changed is accepted after a few.

All of it is arithmetic on the device, on numbers every rank has alike: the update is multiplied by nothing, and the host learns
of it when a step is logged. The window is part of a checkpoint, so that a resumed run decides as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.config.survival import GuardSpec

_FLOOR = 0.01  # a standard deviation counts as at least this share of the mean
_REMEMBERED = 64  # skipped steps kept on the device until the host asks


class Skipped(NamedTuple):
    """A step that was left out, and what would have been usual."""

    step: int
    loss: float
    grad_norm: float
    loss_limit: float
    norm_limit: float

    @property
    def reason(self) -> str:
        limits = (self.loss, self.loss_limit), (self.grad_norm, self.norm_limit)
        return "spike" if all(abs(value) < float("inf") for value, _ in limits) else "non-finite"


class Guard:
    def __init__(self, spec: GuardSpec, device: torch.device) -> None:
        self.spec = spec
        self._window = torch.zeros(2, spec.window, device=device)  # loss and gradient norm of the last steps
        self._places = torch.arange(spec.window, device=device)
        self._entered = torch.zeros((), dtype=torch.int64, device=device)
        self._streak = torch.zeros((), dtype=torch.int64, device=device)  # skipped in a row, up to now
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)  # in all
        self._remembered = torch.zeros(_REMEMBERED, 5, dtype=torch.float64, device=device)
        self._told = 0  # of the skipped, those the host knows of
        self.rewinds = 0
        self.passed: list[tuple[int, int]] = []  # (samples consumed before, samples passed over)

    def judge(self, step: int, loss: Tensor, norm: Tensor, excused: Tensor) -> Tensor:
        """1 where the step is to be skipped, else 0. `excused` says that somebody else deals with it, and it is not usual."""
        values = torch.stack([loss.float(), norm.float()])
        mean = self._window.mean(1)
        deviation = torch.maximum(self._window.std(1, correction=0), _FLOOR * mean.abs())
        full = self._entered >= self.spec.window
        limits = torch.where(full, mean + self.spec.sigma * deviation, torch.inf)
        finite = values.isfinite().all()
        bad = ~(finite & (values <= limits).all()) & ~excused

        place = self._entered % self.spec.window
        enters = (self._places == place) & finite & ~excused
        self._window = torch.where(enters, torch.minimum(values, limits)[:, None], self._window)
        self._entered += finite & ~excused
        self._streak = torch.where(bad, self._streak + 1, torch.where(excused, self._streak, 0))
        row = torch.cat([torch.full_like(values[:1], step), values, limits]).double()
        here = (self._skipped % _REMEMBERED == torch.arange(_REMEMBERED, device=row.device)) & bad
        self._remembered = torch.where(here[:, None], row, self._remembered)
        self._skipped += bad
        return bad.float()

    def report(self) -> tuple[list[Skipped], int]:
        """(steps skipped since the last report, the newest 64 at most; how many in a row up to now); waits for the device."""
        skipped, streak = int(self._skipped), int(self._streak)
        rows = self._remembered.tolist() if skipped > self._told else []
        first = max(self._told, skipped - _REMEMBERED)
        self._told = skipped
        found = [Skipped(int(row[0]), *row[1:]) for row in (rows[n % _REMEMBERED] for n in range(first, skipped))]
        return found, streak

    def position(self, consumed_samples: int) -> int:
        """Where in the stream the next sample is: past those that were passed over."""
        return consumed_samples + sum(count for at, count in self.passed if at <= consumed_samples)

    def rewound(self, rewinds: int, passed: list[tuple[int, int]]) -> None:
        """The run begins again from a checkpoint whose state was loaded: what is known by now, it did not know."""
        self.rewinds, self.passed = rewinds, passed
        self._streak.zero_()

    @property
    def skipped(self) -> int:
        """In all; waits for the device."""
        return int(self._skipped)

    def numbers(self) -> dict[str, float]:
        """The whole state, read from the device."""
        found = {
            "guard/window": float(self.spec.window),
            "guard/entered": float(self._entered),
            "guard/streak": float(self._streak),
            "guard/skipped": float(self._skipped),
            "guard/rewinds": float(self.rewinds),
        }
        for n, (at, count) in enumerate(self.passed):
            found |= {f"guard/passed/{n}/at": float(at), f"guard/passed/{n}/count": float(count)}
        for kind, row in zip(("loss", "norm"), self._window.tolist(), strict=True):
            found |= {f"guard/{kind}/{n}": value for n, value in enumerate(row[: int(self._entered)])}
        return found

    def load(self, numbers: Mapping[str, float]) -> None:
        """A run that had no guard so far, or another window, starts afresh."""
        for tensor in (self._window, self._entered, self._streak, self._skipped):
            tensor.zero_()
        if numbers.get("guard/window") == self.spec.window:
            self._entered.fill_(int(numbers["guard/entered"]))
            self._streak.fill_(int(numbers["guard/streak"]))
            self._skipped.fill_(int(numbers["guard/skipped"]))
            held = min(int(self._entered), self.spec.window)
            rows = [[numbers[f"guard/{kind}/{n}"] for n in range(held)] for kind in ("loss", "norm")]
            self._window[:, :held] = torch.tensor(rows)
        self.rewinds = int(numbers.get("guard/rewinds", 0))
        self.passed = []
        while (at := numbers.get(f"guard/passed/{len(self.passed)}/at")) is not None:
            self.passed.append((int(at), int(numbers[f"guard/passed/{len(self.passed)}/count"])))
        self._told = int(self._skipped)

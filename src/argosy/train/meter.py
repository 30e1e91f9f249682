"""What a logged step looks like: loss, rates, utilisation, waiting, memory and the time that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from argosy.plan.hardware import Peak
from argosy.record.jsonl import Record, now


@dataclass
class Meter:
    """Rates are over the steps since the last log, without evaluations and saves; the ETA is over all samples of this process
    but those of the first step, which pays for warming up, and with everything that came between them."""

    steps: int
    samples: int  # of the whole run
    flops_per_token: float
    peak: Peak | None
    devices: int = 1  # the peak is of each
    _since: float = field(default_factory=time.perf_counter)
    _tokens: int = 0
    _steps_done: int = 0
    _warm_at: float | None = None
    _samples_warm: int = 0

    def count(self, *, samples: int, tokens: int) -> None:
        """After each step."""
        self._tokens += tokens
        self._steps_done += 1
        if self._warm_at is None:
            self._warm_at = time.perf_counter()
        else:
            self._samples_warm += samples

    def pause(self, seconds: float) -> None:
        """Leave the time of an evaluation or a save out of the rates."""
        self._since += seconds

    def record(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        waited_s: float,
        memory_gib: float,
        samples: int,
        tokens: int,
    ) -> Record:
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        tokens_per_s = self._tokens / elapsed
        tflops = tokens_per_s * self.flops_per_token / 1e12
        step_s = elapsed / max(1, self._steps_done)
        if self._warm_at is not None and self._samples_warm:
            left_s = (time.perf_counter() - self._warm_at) / self._samples_warm * (self.samples - samples)
        else:
            left_s = step_s * (self.steps - step)
        self._since, self._tokens, self._steps_done = time.perf_counter(), 0, 0
        return {
            "step": step,
            "steps": self.steps,
            "time": now(),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "samples": samples,
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_gpu": tokens_per_s / self.devices,
            "tflops": tflops,
            "mfu": None if self.peak is None else tflops / (self.peak.tflops * self.devices),
            "peak": None if self.peak is None else str(self.peak),
            "step_s": step_s,
            "data_wait": min(1.0, waited_s / elapsed),
            "memory_gib": memory_gib,
            "eta_s": left_s,
        }

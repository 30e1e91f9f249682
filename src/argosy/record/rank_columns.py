"""Per-rank timings and sensor readings between two logs: one line of `ranks.jsonl`, with one list for each of `COLUMNS`.

Ranks that exchange gradients finish a step at the same time. A straggler shows in `own_s`, the rank's own work without the
time it waits for other ranks. Ranks of one pipeline stage do the same work and are compared; stages differ by design.

`Sensors` reads a GPU's sensors by NVML: utilisation, temperature, power and clock throttling. A thread reads NVML every 5 seconds, and a logged step takes the last reading, so that a slow driver never delays training.
Without NVML (nvidia-ml-py, or a driver) there are no readings.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.record.jsonl import Record

# own_s: seconds a step of the rank's own work (data wait, forward, backward, optimiser), without waiting for other ranks.
COLUMNS = ("own_s", "data_s", "memory_gib", "utilisation", "temperature", "power_w", "throttled")


@dataclass(frozen=True)
class Ranks:
    """One line of `ranks.jsonl`. Each list in `columns` has one value for each rank; `stages` counts pipeline stages."""

    step: int
    time: float
    columns: dict[str, list[float]]
    stages: int = 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], *, step: int, time: float, stages: int) -> Ranks:
        columns = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        return cls(step, time, {n: v for n, v in columns.items() if not all(map(math.isnan, v))}, stages)

    @classmethod
    def read(cls, record: Record) -> Ranks | None:
        """Parse a line of the file. Returns None if it is not valid."""
        columns = {name: values for name in COLUMNS if (values := _numbers(record.get(name)))}
        step, time, stages = (
            record.get(key, default) for key, default in (("step", None), ("time", 0.0), ("stages", 1))
        )
        if not isinstance(step, int) or not isinstance(time, int | float) or not isinstance(stages, int) or stages < 1:
            return None
        return cls(step, time, columns, stages) if "own_s" in columns else None

    def line(self) -> Record:
        rounded = {name: [_rounded(v) for v in values] for name, values in self.columns.items()}
        return {"step": self.step, "time": self.time, "stages": self.stages, **rounded}

    def ratios(self) -> list[float]:
        """Return each rank's own work divided by the median of the other ranks of its pipeline stage."""
        own = self.columns["own_s"]
        each = max(1, len(own) // self.stages)
        return [ratio for first in range(0, len(own), each) for ratio in _over_peers(own[first : first + each])]

    def summary(self) -> Record:
        """Return the fields for the step's record: spread between ranks, slowest rank, combined sensor readings."""
        ratios = self.ratios()
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        record: Record = {}
        if len(ratios) > 1:
            record |= {"rank_spread": ratios[slowest] - 1, "slowest_rank": slowest}
        reductions: dict[str, Callable[[list[float]], float]] = {
            "utilisation": statistics.fmean,
            "temperature": max,
            "power_w": math.fsum,
            "throttled": math.fsum,
        }
        for name, reduce in reductions.items():
            values = [v for v in self.columns.get(name, []) if not math.isnan(v)]
            if values:
                record[f"gpu/{name}"] = reduce(values)
        return record


def _over_peers(values: Sequence[float]) -> list[float]:
    """Return each value divided by the median of the others."""
    if len(values) < 2:
        return [1.0] * len(values)
    own, others = np.array(values, np.float64), len(values) - 1
    ordered, place = np.sort(own), np.empty(len(own), np.int64)
    place[np.argsort(own, kind="stable")] = np.arange(len(own))
    # Indices of the median of the others. Leaving out a value at or below an index moves that index up by one.
    low, high = (others - 1) // 2, others // 2
    medians = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
    return list(map(float, own / np.maximum(medians, 1e-12)))


def _numbers(values: object) -> list[float]:
    """Return a JSON list as floats, null as NaN. Returns an empty list if `values` is anything else."""
    if not isinstance(values, list) or not all(value is None or type(value) in (int, float) for value in values):
        return []
    return [math.nan if value is None else float(value) for value in values]


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")


# A reading is stale after 6 intervals.
READ_EVERY_S, _STALE = 5.0, 6
# NVML's throttle reasons that mean a problem: hardware slowdown, software and hardware thermal slowdown, power brake. The power
# cap (0x04) is left out: a GPU under full load reaches it.
THROTTLES = 0x08 | 0x20 | 0x40 | 0x80
FIELDS = ("utilisation", "temperature", "power_w", "throttled")


class Sensors:
    """The sensors of one GPU, found by its UUID.

    `read` never blocks. Values that the device does not report are left out, as the utilisation of a MIG instance. A reading
    that is stale because the driver no longer answers is left out too.
    """

    def __init__(self, uuid: str | None, *, every_s: float = READ_EVERY_S) -> None:
        self._latest: dict[str, float] = {}
        self._at, self._every_s = 0.0, every_s
        self._stop = threading.Event()
        self._device: Any = None
        if uuid is not None:
            self._open(uuid)

    def read(self) -> dict[str, float]:
        return self._latest if time.monotonic() - self._at < _STALE * self._every_s else {}

    def close(self) -> None:
        self._stop.set()

    def _open(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._device = _device(pynvml, uuid)
        except (pynvml.NVMLError, AttributeError):
            return
        threading.Thread(target=self._keep_reading, args=(pynvml,), name="argosy-sensors", daemon=True).start()

    def _keep_reading(self, nvml: Any) -> None:
        while not self._stop.is_set():
            self._latest, self._at = _readings(nvml, self._device), time.monotonic()
            self._stop.wait(self._every_s)


def _device(nvml: Any, uuid: str) -> Any:
    """Return the NVML handle of a GPU, or of the GPU that a MIG instance is part of.

    torch leaves out the prefix of the UUID, GPU- or MIG-, so both are tried.
    """
    if not uuid.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except nvml.NVMLError:
            uuid = f"MIG-{uuid.removeprefix('GPU-')}"
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(uuid))


def _readings(nvml: Any, device: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, ask in _ASKED.items():
        try:
            found[name] = float(ask(nvml, device))
        except (nvml.NVMLError, AttributeError, TypeError):
            # The GPU, the driver or this version of nvidia-ml-py does not have this sensor.
            continue
    return found


def _throttled(nvml: Any, device: Any) -> bool:
    # The name since driver 535, and the older one.
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return bool((ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(device) & THROTTLES)


_ASKED: dict[str, Callable[[Any, Any], float]] = {
    "utilisation": lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
    "temperature": lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
    "throttled": _throttled,
}

"""GPU sensors by NVML: utilisation, temperature, power and clock throttling.

A thread reads NVML every 5 seconds, and a logged step takes the last reading, so that a slow driver never delays training.
Without NVML (nvidia-ml-py, or a driver) there are no readings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

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

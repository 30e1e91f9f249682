"""What the GPU's own sensors say: utilisation, temperature, power, and why its clock is held down.

A thread asks NVML every few seconds, and a logged step takes what was read last, so that a slow driver holds up nobody.
Without NVML (nvidia-ml-py, or a driver) there is nothing to say, and nothing is said.
"""

from __future__ import annotations

import threading
from typing import Any

READ_EVERY_S = 5.0
# NVML's reasons for a lower clock that mean harm: hardware slow-down, heat (two kinds), power brake. A GPU at its power limit
# (0x04) is one at work.
THROTTLES = 0x08 | 0x20 | 0x40 | 0x80
FIELDS = ("utilisation", "temperature", "power_w", "throttled")


class Sensors:
    """Of one GPU, by the UUID the driver gives it. `read` never waits."""

    def __init__(self, uuid: str | None) -> None:
        self._latest: dict[str, float] = {}
        self._stop = threading.Event()
        self._device: Any = None
        if uuid is not None:
            self._open(uuid)

    def read(self) -> dict[str, float]:
        return self._latest

    def close(self) -> None:
        self._stop.set()

    def _open(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError:
            return
        threading.Thread(target=self._keep_reading, args=(pynvml,), name="argosy-sensors", daemon=True).start()

    def _keep_reading(self, nvml: Any) -> None:
        while not self._stop.is_set():
            try:
                reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device)
                self._latest = {
                    "utilisation": float(nvml.nvmlDeviceGetUtilizationRates(self._device).gpu) / 100,
                    "temperature": float(nvml.nvmlDeviceGetTemperature(self._device, nvml.NVML_TEMPERATURE_GPU)),
                    "power_w": nvml.nvmlDeviceGetPowerUsage(self._device) / 1000,
                    "throttled": float(bool(reasons & THROTTLES)),
                }
            except nvml.NVMLError:
                self._latest = {}
            self._stop.wait(READ_EVERY_S)

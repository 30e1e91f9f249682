"""What the GPU's own sensors say: utilisation, temperature, power, and why its clock is held down.

A thread asks NVML every few seconds, and a logged step takes what was read last, so that a slow driver holds up nobody.
Without NVML (nvidia-ml-py, or a driver) there is nothing to say, and nothing is said.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

READ_EVERY_S, _STALE = 5.0, 6  # and readings after which the last one no longer holds
# NVML's reasons for a lower clock that mean harm: hardware slow-down, heat (two kinds), power brake. A GPU at its power limit
# (0x04) is one at work.
THROTTLES = 0x08 | 0x20 | 0x40 | 0x80
FIELDS = ("utilisation", "temperature", "power_w", "throttled")


class Sensors:
    """Of one GPU, by the UUID the driver gives it. `read` never waits; what a card does not tell, as a part of one (MIG) does not
    tell its utilisation, is left out, and so is what was read too long ago by a driver that no longer answers."""

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
    """The card, also where the name is that of a part of it (MIG); torch leaves out the prefix that tells them apart."""
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
        except (
            nvml.NVMLError,
            AttributeError,
            TypeError,
        ):  # the card, the driver, or this version of the library has no such thing
            continue
    return found


def _throttled(nvml: Any, device: Any) -> bool:
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # its name since driver 535
    return bool((ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(device) & THROTTLES)


_ASKED: dict[str, Callable[[Any, Any], float]] = {
    "utilisation": lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
    "temperature": lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
    "throttled": _throttled,
}

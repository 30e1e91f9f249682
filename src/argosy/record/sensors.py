"""Sensors of a rank's GPU, by NVML, and of its host, by /proc and /sys: use, temperature, power, memory, network.

A thread reads each source every 5 seconds, and a logged step takes the last reading, so that a slow driver never delays
training. Without NVML (nvidia-ml-py, or a driver) there are no readings of a GPU, and without /proc none of a host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Reading = dict[str, float]
# A reading is stale after 6 intervals.
READ_EVERY_S, _STALE = 5.0, 6
GIB, MB = 1 << 30, 1e6
# NVML's throttle reasons that mean a problem: hardware slowdown, software and hardware thermal slowdown, power brake. The power
# cap (0x04) is left out: a GPU under full load reaches it.
THROTTLES = 0x08 | 0x20 | 0x40 | 0x80


class Sensors:
    """The sensors of one GPU, found by its UUID, and those of the host if `host` is true.

    `read` never blocks. Values that a device does not report are left out, as the utilisation of a MIG instance. A reading
    that is stale because the driver no longer answers is left out too.
    """

    def __init__(self, uuid: str | None, *, host: bool = False, every_s: float = READ_EVERY_S) -> None:
        sources = [gpu for gpu in (_gpu(uuid),) if gpu is not None] + ([HostSensors().read] if host else [])
        self._readers = [_Reader(source, every_s) for source in sources]

    def read(self) -> Reading:
        return {name: value for reader in self._readers for name, value in reader.latest().items()}

    def close(self) -> None:
        for reader in self._readers:
            reader.stop.set()


class _Reader:
    """A thread that reads one source. A source that hangs does not hold up the others."""

    def __init__(self, source: Callable[[], Reading], every_s: float) -> None:
        self._source, self._every_s, self.stop = source, every_s, threading.Event()
        self._latest: Reading = {}
        self._at = 0.0
        threading.Thread(target=self._keep_reading, name="argosy-sensors", daemon=True).start()

    def latest(self) -> Reading:
        return self._latest if time.monotonic() - self._at < _STALE * self._every_s else {}

    def _keep_reading(self) -> None:
        while not self.stop.is_set():
            self._latest, self._at = self._source(), time.monotonic()
            self.stop.wait(self._every_s)


class HostSensors:
    """CPU use, memory and network traffic of this host. Rates are those since the last read, so the first one has none."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc, self._sys = proc, sys
        self._counters: dict[str, float] = {}
        self._at = time.monotonic()

    def read(self) -> Reading:
        found: Reading = {}
        for ask in (self._cpu, self._memory, self._network):
            try:
                found |= ask()
            except (OSError, ValueError, IndexError, KeyError):
                # This system does not have the file, or writes it in another way.
                continue
        self._at = time.monotonic()
        return found

    def _grown(self, name: str, counter: float) -> float | None:
        """Return how much a counter has grown since the last read; None at the first, or if it began anew."""
        before = self._counters.get(name)
        self._counters[name] = counter
        return None if before is None or counter < before else counter - before

    def _cpu(self) -> Reading:
        # user nice system idle iowait irq softirq steal; guest time is part of user time.
        ticks = [float(field) for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, whole = self._grown("idle", ticks[3] + ticks[4]), self._grown("ticks", sum(ticks))
        return {} if idle is None or not whole else {"cpu": max(0.0, 1 - idle / whole)}

    def _memory(self) -> Reading:
        lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
        kib = {fields[0]: float(fields[1]) for fields in lines if len(fields) > 1}
        return {"host_gib": (kib["MemTotal:"] - kib["MemAvailable:"]) * 1024 / GIB}

    def _network(self) -> Reading:
        cards, passed = self._interfaces() | self._fabric(), time.monotonic() - self._at
        grown = [
            [self._grown(f"{card} {i}", count) for i, count in enumerate(counts)] for card, counts in cards.items()
        ]
        if passed <= 0 or not grown or any(value is None for row in grown for value in row):
            return {}
        received, sent = (sum(row[i] or 0.0 for row in grown) / passed / MB for i in (0, 1))
        return {"received_mb_s": received, "sent_mb_s": sent}

    def _interfaces(self) -> dict[str, tuple[float, float]]:
        """Return the bytes received and sent of each network interface.

        Bridges and virtual interfaces repeat the traffic of the physical ones, so they count only where there are no others,
        as in a pod.
        """
        lines = (line.partition(":") for line in (self._proc / "net/dev").read_text().splitlines()[2:])
        found = {name.strip(): rest.split() for name, _, rest in lines if name.strip() != "lo"}
        physical = {
            name: fields for name, fields in found.items() if (self._sys / "class/net" / name / "device").exists()
        }
        return {name: (float(fields[0]), float(fields[8])) for name, fields in (physical or found).items()}

    def _fabric(self) -> dict[str, tuple[float, float]]:
        """Return the bytes received and sent of each port for RDMA, whose traffic passes by the kernel.

        InfiniBand and RoCE count words of 4 bytes, EFA bytes.
        """
        found: dict[str, tuple[float, float]] = {}
        for port in sorted((self._sys / "class/infiniband").glob("*/ports/*")):
            for names, unit in (
                (("counters/port_rcv_data", "counters/port_xmit_data"), 4),
                (("hw_counters/rx_bytes", "hw_counters/tx_bytes"), 1),
            ):
                if all((port / name).is_file() for name in names):
                    received, sent = (unit * float((port / name).read_text()) for name in names)
                    found[str(port)] = (received, sent)
                    break
        return found


def _gpu(uuid: str | None) -> Callable[[], Reading] | None:
    """Return the reader of a GPU, or None without a GPU, a driver or the library."""
    found = None if uuid is None else open_nvml(uuid)
    return None if found is None else partial(_readings, *found)


def open_nvml(uuid: str) -> tuple[Any, Any] | None:
    """Return the library NVML and its handle of a GPU, or None without such a GPU, a driver or the library."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, _device(pynvml, uuid)
    except (pynvml.NVMLError, AttributeError):
        return None


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


def _readings(nvml: Any, device: Any) -> Reading:
    found: Reading = {}
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
    "device_gib": lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used / GIB,
}

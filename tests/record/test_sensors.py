"""Sensors: those of a GPU with a stand-in for NVML, since most test machines have no GPU, and those of a host from files."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.record import sensors as sensors_module
from argosy.record.sensors import HostSensors, Sensors
from waiting import wait_for

ALL = {"utilisation": 0.97, "temperature": 71.0, "power_w": 412.5, "throttled": 1.0, "device_gib": 60.5}


class NVMLError(Exception):
    pass


def refuse(*arguments: object) -> Any:
    raise NVMLError("not supported")


def card(**changes: Any) -> SimpleNamespace:
    """Return a stand-in for pynvml. `changes` replaces functions; None removes one."""
    functions: dict[str, Any] = {
        "NVMLError": NVMLError, "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda device: "whole card",
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=97),
        "nvmlDeviceGetTemperature": lambda device, kind: 71,
        "nvmlDeviceGetPowerUsage": lambda device: 412_500,
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(used=60.5 * 2**30),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: 0x44,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda device: 0x44,
    }  # fmt: skip
    return SimpleNamespace(**{name: value for name, value in (functions | changes).items() if value is not None})


def read(monkeypatch: pytest.MonkeyPatch, module: object, uuid: str = "GPU-1") -> dict[str, float]:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    sensors = Sensors(uuid)
    try:
        return wait_for(sensors.read)  # type: ignore[no-any-return]
    finally:
        sensors.close()


def test_all_is_read_whichever_name_the_library_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, card()) == ALL
    assert read(monkeypatch, card(nvmlDeviceGetCurrentClocksEventReasons=None)) == ALL
    assert read(monkeypatch, card(nvmlDeviceGetCurrentClocksThrottleReasons=None)) == ALL
    # At its power cap.
    at_work = card(nvmlDeviceGetCurrentClocksEventReasons=lambda device: 0x04)
    assert read(monkeypatch, at_work)["throttled"] == 0.0


@pytest.mark.parametrize(
    ("function", "figure"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilisation"), ("nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetPowerUsage", "power_w"), ("nvmlDeviceGetCurrentClocksEventReasons", "throttled"),
        ("nvmlDeviceGetMemoryInfo", "device_gib"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("instead", [refuse, lambda *arguments: None])
def test_what_a_card_does_not_tell_is_left_out_and_the_rest_is_told(
    function: str, figure: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(monkeypatch, card(**{function: instead})) == {n: v for n, v in ALL.items() if n != figure}


# torch's UUID has no prefix.
@pytest.mark.parametrize("uuid", ["MIG-7", "7"])
def test_a_part_of_a_card_is_read_at_the_whole_one(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def by_uuid(name: str) -> str:
        return name if name == "MIG-7" else refuse()

    module = card(
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetPowerUsage=lambda device: asked.append(device) or 1000,
        nvmlDeviceGetUtilizationRates=refuse,
    )
    assert read(monkeypatch, module, uuid)["power_w"] == 1.0
    assert set(asked) == {"whole card"}


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_a_driver_nothing_is_said(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (card(**{function: refuse}), None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        before = set(threading.enumerate())
        assert Sensors("GPU-1").read() == {}
        # No reader thread is left. Those of other tests may end meanwhile.
        assert set(threading.enumerate()) <= before


def test_a_reading_of_a_driver_that_no_longer_answers_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended, now = [], threading.Event(), 1000.0

    def temperature(device: object, kind: int) -> int:
        asked.append(device)
        if len(asked) > 1:
            ended.wait()
        return 71

    monkeypatch.setitem(sys.modules, "pynvml", card(nvmlDeviceGetTemperature=temperature))
    monkeypatch.setattr(sensors_module, "time", SimpleNamespace(monotonic=lambda: now))
    sensors = Sensors("GPU-1", every_s=0.02)
    wait_for(lambda: len(asked) > 1)
    assert sensors.read() == ALL
    now += 1
    assert sensors.read() == {}
    ended.set()
    sensors.close()


def host(root: Path, *, idle: int, eth: tuple[int, int], fabric: tuple[int, int]) -> None:
    """Write the files of a host with one physical card, a bridge that repeats its traffic, and one InfiniBand port."""
    (root / "proc/net").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {1000 - idle} 0 0 {idle} 0 0 0 0 7 0\ncpu0 1 1 1 1\n")
    (root / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 2097152 kB\n")
    line = f"{eth[0]} 0 0 0 0 0 0 0 {eth[1]} 0 0 0 0 0 0 0"
    rows = "".join(f"  {name}: {line}\n" for name in ("lo", "eth0", "bridge0"))
    (root / "proc/net/dev").write_text(f"Inter-|\n face |\n{rows}")
    (root / "sys/class/net/eth0/device").mkdir(parents=True, exist_ok=True)
    counters = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True, exist_ok=True)
    for name, words in zip(("port_rcv_data", "port_xmit_data"), fabric, strict=True):
        (counters / name).write_text(f"{words}\n")


def test_a_host_tells_its_use_memory_and_traffic_since_the_last_reading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 100.0
    monkeypatch.setattr(sensors_module, "time", SimpleNamespace(monotonic=lambda: now))
    host(tmp_path, idle=500, eth=(0, 0), fabric=(0, 0))
    sensors = HostSensors(tmp_path / "proc", tmp_path / "sys")
    assert sensors.read() == {"host_gib": 6.0}
    now += 2
    (tmp_path / "proc/stat").write_text("cpu  800 0 0 600 0 0 0 0 7 0\n")
    host(tmp_path / "later", idle=0, eth=(4_000_000, 2_000_000), fabric=(500_000, 1_000_000))
    for name in ("proc/net/dev", "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data"):
        (tmp_path / name).write_text((tmp_path / "later" / name).read_text())
    words = "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data"
    (tmp_path / words).write_text((tmp_path / "later" / words).read_text())
    # 300 of 400 ticks at work; (4 + 2) MB and (2 + 4) MB in 2 seconds. The bridge is not counted.
    assert sensors.read() == {"cpu": 0.75, "host_gib": 6.0, "received_mb_s": 3.0, "sent_mb_s": 3.0}
    # A counter that began anew has no rate.
    host(tmp_path, idle=500, eth=(1, 1), fabric=(0, 0))
    assert "received_mb_s" not in sensors.read()


def test_a_system_without_these_files_has_no_readings(tmp_path: Path) -> None:
    assert HostSensors(tmp_path, tmp_path).read() == {}

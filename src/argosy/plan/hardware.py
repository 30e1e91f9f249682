"""GPU facts. A peak is named and dense (no sparsity), or unknown: MFU against a guessed peak is worse than none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Dense matrix throughput of one device, in TFLOP/s, for 16-bit inputs with 32-bit accumulation."""

    name: str
    tflops: float

    def __str__(self) -> str:
        return f"{self.name} {self.tflops:g}"


# Vendors' dense 16-bit figures. Matched in order against the device name, so the more particular name stands first.
_PEAKS = (
    ("GB200", 2450.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A10G", 70.0),
    ("L40S", 362.0),
    ("V100", 125.0),
)


def dense_peak(device_name: str) -> Peak | None:
    for name, tflops in _PEAKS:
        if name in device_name:
            return Peak(name, tflops)
    return None

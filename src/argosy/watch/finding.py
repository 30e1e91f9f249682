"""One thing the doctor found: what it is, what to do, the evidence, and how directly it explains that training does not go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Weights. WELL: nothing explains it better than that a run is done.
WELL, STALL, FULL, DEATH, KNOWN, NUMBERS = 100, 95, 92, 90, 85, 80
FAILED, DISK, OVERFLOW, SLOW, WARNING, NOTE = 77, 75, 60, 50, 40, 10

# Events that may follow the one that ends a run.
BESIDE = ("alert", "sink-down", "sink-up")


@dataclass(frozen=True)
class Finding:
    weight: int
    verdict: str
    fix: str
    evidence: list[str] = field(default_factory=list)
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "verdict": self.verdict, "fix": self.fix, "evidence": self.evidence}

"""One thing the doctor found: what it is, what to do, the evidence, and how directly it explains that training does not go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Weights. WELL: nothing explains it better than that a run is done. FINE: it trains, and what is lighter is a note beside that. A known cause explains why a rank died or stands still.
WELL, KNOWN, STALL, FULL, DEATH, NUMBERS = 100, 96, 95, 92, 90, 80
FAILED, DISK, SETBACK, CONSEQUENCE, OVERFLOW, SLOW, WARNING, FINE, NOTE = 77, 75, 72, 70, 60, 50, 40, 30, 20

STATES = ("done", "running", "stopped", "new", "dead")  # names of the finding that says only how the run is

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


def called(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

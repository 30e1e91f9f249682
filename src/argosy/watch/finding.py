"""A finding of the doctor: verdict, fix, evidence, and a weight for how directly it explains that training does not go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Weights. WELL: the run is done, which outweighs everything. FINE: the run trains, and lighter findings are notes beside
# that. KNOWN: a known failure explains why a rank died or stalled.
WELL, KNOWN, STALL, FULL, DEATH, NUMBERS = 100, 96, 95, 92, 90, 80
FAILED, DISK, SETBACK, CONSEQUENCE, OVERFLOW, SLOW, WARNING, FINE, NOTE = 77, 75, 72, 70, 60, 50, 40, 30, 20

# Names of findings that only state how the run is.
STATES = ("done", "running", "stopped", "new", "dead")

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


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2, 3 and 4 more"."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

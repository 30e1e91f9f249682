"""Tests of the guides use the schemas and the emulated API server of tests/launch, the run of tests/e2e, and the Hub of tests/data."""

from __future__ import annotations

import sys
from pathlib import Path

for neighbour in ("launch", "e2e", "data"):
    sys.path.append(str(Path(__file__).parents[1] / neighbour))

"""Calibration: what the models of memory and time take from measurements, read from `facts/calibration.yaml`.

Facts of a software stack (what it keeps, what it overlaps) stand apart from the fitted constants, each of which has a
physical meaning and a source. They are fewer than forty in all, and belong to a GPU or a stack, never to a model or a row.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from argosy.config.model import Section
from argosy.config.reader import read_yaml

FILE = Path(__file__).parent / "facts" / "calibration.yaml"


class Stack(Section):
    """What a software stack does, in bytes and choices."""

    weight: float
    gradient: float
    gradient_once: float
    optimiser: float
    logit: float
    chunked_loss: bool = False
    attention: Literal["flash", "unfused"]
    selective: Literal["products", "half", "scores"]


class Calibration(Section):
    stacks: dict[str, Stack]
    fragmentation: float
    context: float


@lru_cache
def calibration() -> Calibration:
    tree = read_yaml(FILE)[0]
    return Calibration.model_validate({"stacks": tree["stacks"], **tree["memory"]})

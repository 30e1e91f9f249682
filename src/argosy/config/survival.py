"""The parts of the run spec that say what happens when something goes wrong: to a rank, and to the numbers."""

from __future__ import annotations

from pydantic import Field

from argosy.config.model import Section
from argosy.config.units import DurationOrNull, Positive, PositiveNumber, Seconds, Whole


class FaultSpec(Section):
    """What the supervisor of `argosy train --nproc` does about ranks that die or stand still."""

    stall_after: Seconds = Field(
        45.0,
        description="that a rank may stay in one phase of a step, or four times the longest it has taken so far, if that is more",
    )
    start_after: Seconds = Field(
        1800.0,
        description="the same where no time is known yet: starting, loading, the first step, the first save, and the last, which is waited for",
    )
    restarts: Whole = Field(10, description="restarts in a row without a new checkpoint, before giving up")
    same_step: Positive = Field(3, description="deaths at one and the same step, before giving up")
    backoff: Seconds = Field(1.0, description="wait before the first restart; it doubles with each, up to a minute")
    nodes_wait: Seconds = Field(
        900.0, description="that nodes wait for each other, at the start and after one was lost"
    )


class GuardSpec(Section):
    """What is done about steps whose numbers are not to be trusted. `guard: off` applies every step."""

    window: Positive = Field(128, description="steps whose loss and gradient norm say what is usual")
    sigma: PositiveNumber | None = Field(
        None,
        description="skip also what is so many standard deviations above the mean of the window, as 6, though healthy steps are too; "
        "null: only what no healthy run shows",
    )
    skips: Positive = Field(8, description="steps in a row to skip, before the run is rewound past their samples")
    rewinds: Whole = Field(2, description="times to rewind, before the run stops")
    replica_check: DurationOrNull = Field(
        None, description="how often ranks that hold the same parameters compare them, as 100ba; null: never"
    )

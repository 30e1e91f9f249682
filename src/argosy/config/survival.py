"""The `fault` and `guard` sections of the run spec: reactions to failed ranks, and to loss spikes and NaN."""

from __future__ import annotations

from pydantic import Field

from argosy.config.model import Section
from argosy.config.units import DurationOrNull, Positive, PositiveNumber, Seconds, Whole


class FaultSpec(Section):
    """Fault tolerance: how the supervisor of `argosy train --nproc` handles ranks that die or hang."""

    stall_after: Seconds = Field(
        45.0,
        description="time a rank may stay in one phase of a step before it counts as hung, or four times its longest so far if that "
        "is more",
    )
    start_after: Seconds = Field(
        1800.0,
        description="the same limit for phases without a measured time: start, load, the first step, the first save, the last save",
    )
    restarts: Whole = Field(10, description="consecutive restarts without a new checkpoint before giving up")
    same_step: Positive = Field(3, description="failures at the same step before giving up")
    backoff: Seconds = Field(1.0, description="wait before the first restart; it doubles each time, up to a minute")
    nodes_wait: Seconds = Field(
        900.0, description="time nodes wait for each other (rendezvous), at the start and after a node is lost"
    )


class GuardSpec(Section):
    """Handling of steps with a loss spike, a gradient norm spike or NaN. `guard: off` applies every step."""

    window: Positive = Field(
        128, description="number of recent steps whose loss and gradient norm define what is normal"
    )
    sigma: PositiveNumber | None = Field(
        None,
        description="also skip steps this many standard deviations above the mean of the window, for example 6, though healthy runs "
        "have such steps too; null: skip only what no healthy run shows",
    )
    skips: Positive = Field(8, description="consecutive steps to skip before the run rewinds past their samples")
    rewinds: Whole = Field(2, description="rewinds before the run stops")
    replica_check: DurationOrNull = Field(
        None, description="how often ranks that hold the same parameters compare them, for example 100ba; null: never"
    )

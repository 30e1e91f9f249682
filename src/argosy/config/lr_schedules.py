"""The registry of learning-rate schedules and of the shapes of a decay: the values of `optim.schedule` and `optim.decay_shape`.

It stands below the schema, which takes its choices from it. Every schedule rises to the peak over the warmup; its entry says how it goes on, so
that no other code compares the names of schedules. A schedule with another decay is a line in each table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# The remaining fraction of a decay from the peak to the final rate: from 1 to 0 as the share that is done goes from 0 to 1.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * math.pow(0.5, done) - 1,
}


@dataclass(frozen=True)
class LrSchedule:
    """The course of the learning rate after the warmup."""

    # The shape of the decay to the final rate. None: the rate does not decay by the length of the run.
    shape: str | None = None
    # The rate stays at the peak until the last `optim.decay`, and `optim.decay_shape` may choose another shape.
    is_stable: bool = False
    # The rate falls with the square root of the progress, until it reaches the final one.
    by_root: bool = False
    # What other trainers call it, by trainer.
    names_elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def falls(self) -> bool:
        return self.by_root or self.shape is not None


LR_SCHEDULES: dict[str, LrSchedule] = {
    "cosine": LrSchedule("cosine", names_elsewhere={"megatron": "cosine", "foundry": "cosine_with_warmup"}),
    "linear": LrSchedule("linear", names_elsewhere={"megatron": "linear", "foundry": "linear_decay_with_warmup"}),
    "constant": LrSchedule(names_elsewhere={"megatron": "constant", "foundry": "constant_with_warmup"}),
    "inverse_sqrt": LrSchedule(
        by_root=True, names_elsewhere={"megatron": "inverse-square-root", "foundry": "inv_sqrt_with_warmup"}
    ),
    "wsd": LrSchedule("linear", is_stable=True, names_elsewhere={"megatron": "WSD"}),
}
# The schedules that `optim.decay` and `optim.decay_shape` belong to.
STABLE = " or ".join(name for name, schedule in LR_SCHEDULES.items() if schedule.is_stable)


def schedule_elsewhere(trainer: str, name: str) -> str | None:
    """Return the name of the schedule that another trainer calls `name`, or None."""
    return next((own for own, schedule in LR_SCHEDULES.items() if schedule.names_elsewhere.get(trainer) == name), None)

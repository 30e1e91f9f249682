"""Dynamic loss scaling for fp16, whose smallest number is 6e-8 and whose largest is 65,504.

The loss is multiplied by a large scale so that gradients do not vanish, and the scale follows what the gradients bear.
A step whose gradients overflow is skipped; once `HYSTERESIS` steps have been, each further one halves the scale. After
`INTERVAL` good steps in a row the scale is doubled, and the patience is restored. A scale below `MINIMUM` means that it
is not the scale that makes the gradients overflow: whoever reads it there gives up. All of it is arithmetic on the device:
the host learns of a skipped step when the step is logged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

INITIAL, MINIMUM = 2.0**16, 1.0  # of the mean over tokens
FACTOR, INTERVAL, HYSTERESIS = 2.0, 1000, 2


class LossScaler:
    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        self._good = torch.zeros((), device=device)  # steps in a row without overflow
        self._patience = torch.full((), float(HYSTERESIS), device=device)  # overflows until the scale is lowered

    def update(self, overflow: Tensor) -> None:
        """After a step; `overflow` is 1 if it was skipped, else 0."""
        bad = overflow > 0
        self._good = torch.where(bad, 0.0, self._good + 1)
        self._patience = torch.where(bad, self._patience - 1, self._patience)
        lower, higher = bad & (self._patience <= 0), self._good == INTERVAL
        factor = torch.where(lower, 1 / FACTOR, torch.where(higher, FACTOR, 1.0))
        self.scale = self.scale * factor
        self._patience = torch.where(higher, float(HYSTERESIS), self._patience)
        self._good = torch.where(higher, 0.0, self._good)

    def numbers(self) -> dict[str, float]:
        """The whole state, read from the device."""
        return {"loss_scale": float(self.scale), "good_steps": float(self._good), "patience": float(self._patience)}

    def load(self, numbers: Mapping[str, float]) -> None:
        """A run that is rewound to its start, or used another precision so far, has none of them, and starts afresh."""
        self.scale.fill_(numbers.get("loss_scale", INITIAL))
        self._good.fill_(numbers.get("good_steps", 0.0))
        self._patience.fill_(numbers.get("patience", HYSTERESIS))

"""The kernel that updates all parameters at once, against torch's own update of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from argosy.config.optimizers.adamw import RULE, AdamWSpec
from argosy.model.ops.choice import kernels
from argosy.train.adamw_update import make_update
from argosy.train.slots import Slot, Update

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UPDATE = make_update(AdamWSpec(), nn.Module())
CASES = [  # elements, precision of parameter and gradient, whether they begin where a wide load may not
    (4096, torch.bfloat16, torch.bfloat16, False),
    (3, torch.bfloat16, torch.bfloat16, False),
    (9000, torch.float32, torch.float32, False),
    (160, torch.bfloat16, torch.bfloat16, True),
    (4097, torch.float16, torch.float32, False),
    (16, torch.float32, torch.bfloat16, True),
    (12288, torch.bfloat16, torch.bfloat16, False),
]


def state() -> tuple[list[Slot], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int, shifted: bool) -> Tensor:
        return torch.rand(count + 1, generator=generator).to(DEVICE)[int(shifted) :][:count]

    slots, gradients = [], []
    for count, parameter, gradient, shifted in CASES:
        master = drawn(count, shifted)
        own = nn.Parameter(master if parameter == torch.float32 else master.to(parameter))
        moments = {key: drawn(count, shifted) for key in RULE.state}
        slots.append(Slot(str(len(slots)), own, master, moments))
        gradients.append((drawn(count, shifted) - 0.5).to(gradient))
    return slots, gradients


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_parameters_of_any_length_place_and_precision_are_updated_at_once(skip: float) -> None:
    update = Update(0.01, *torch.tensor([0.5, skip, 3.0], device=DEVICE).unbind())
    expected, found, before = state(), state(), state()
    with torch.no_grad():
        with kernels(False):
            for slot, gradient in zip(*expected, strict=True):
                UPDATE([slot], [gradient], update, 0.1)
        with kernels(True):
            UPDATE(*found, update, 0.1)
    for old, ours, torchs in zip(before[0], found[0], expected[0], strict=True):
        assert torch.equal(ours.master, old.master) == bool(skip)
        torch.testing.assert_close(ours.master, torchs.master, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours.state, torchs.state, rtol=1e-5, atol=1e-9)
        # the interpreter cuts bits off where the hardware rounds
        torch.testing.assert_close(ours.part, torchs.part, rtol=2**-7, atol=0)

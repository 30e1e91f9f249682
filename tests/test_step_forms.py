"""The benchmark of fused kernels inside steps runs every form with what it turns off, and leaves the model as it was."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from benchmarks import step_forms

from argosy.model.layers import Block
from argosy.model.ops import cross_entropy

TINY = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.vocab_size=97", "train.precision=fp32"]


@pytest.mark.parametrize(("rounds", "counted"), [(1, 3), (3, 6)])
def test_forms_run_in_turn_and_the_first_round_is_not_counted(
    rounds: int, counted: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[bool, ...]] = []
    multiplies = cross_entropy.multiplies
    forward = Block.forward

    def record(self: Block, *given: Any) -> Any:
        logits = cross_entropy.multiplies is multiplies
        seen.append((self.fuses_sums, self.mlp.fuses_activation, self.attn.fuses_rope, logits))
        return forward(self, *given)

    monkeypatch.setattr(Block, "forward", record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["gpt2", "--batch", "2", "--seq-len", "16", "--rounds", str(rounds), "--steps", "3", *TINY]
    monkeypatch.setattr(sys, "argv", ["step_forms.py", *words])
    step_forms.main()
    alone = [tuple(part != off for part in range(4)) for off in range(4)]
    forms = [(True,) * 4, *alone, (False,) * 4]
    assert seen == [form for form in forms for _ in range(4)] * rounds
    assert cross_entropy.multiplies is multiplies
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(step_forms.FORMS)
    assert all(f"{counted} steps" in line for line in lines)

"""The benchmark of the default micro-batch times the size that a run gets, and those around it."""

from __future__ import annotations

import sys

import pytest
import torch
from benchmarks import micro_batch

from argosy.parallel.single import MicroBatches


@pytest.mark.parametrize(
    ("chosen", "batch", "most", "sizes"),
    [(8, 64, 2, [8, 4, 2, 16, 32]), (4, 4, 3, [4, 2, 1]), (1, 12, 2, [1, 2, 3]), (6, 12, 9, [6, 4, 3, 2, 1, 12])],
)
def test_the_sizes_are_those_that_divide_the_batch_around_the_chosen_one(
    chosen: int, batch: int, most: int, sizes: list[int]
) -> None:
    assert list(micro_batch.sizes_around(chosen, batch, most)) == sizes


def test_every_size_is_trained_with_and_one_that_does_not_fit_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    forward = MicroBatches.forward_backward_micro

    def fitting(self: MicroBatches, inputs: dict[str, torch.Tensor], *more: object) -> object:
        seen.append((self.size, len(inputs["tokens"])))
        if self.size == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, inputs, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(MicroBatches, "forward_backward_micro", fitting)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        sys, "argv", ["micro_batch.py", "smoke", "--steps", "2", "--like", "H100", "train.precision=fp32"]
    )
    micro_batch.main()
    steps = micro_batch.WARMUP + 2
    assert seen == steps * [(4, 4)] + 2 * steps * [(2, 2)] + [(1, 1)]
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| gpt2, 4 x 32 | 4 | 4: ")
    assert "1: does not fit |" in row

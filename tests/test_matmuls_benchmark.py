"""The benchmark of a step's matmuls finds all of them, and computes each as the step does."""

from __future__ import annotations

import sys

import pytest
import torch
from benchmarks import matmuls
from benchmarks.matmuls import Matmul, Recorder

from argosy.config.counts import count_parameters
from argosy.config.resolve import resolve_model

DEVICE = torch.device("cpu")
TINY = ["layers=2", "hidden=64", "heads=4", "kv_heads=2", "head_dim=16", "ffn=96", "vocab_size=128", "max_seq_len=16"]


def test_their_operations_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [*(f"model.{size}" for size in TINY), "train.precision=fp32"]
    words = [
        "llama3-1b",
        "--batch",
        "2",
        "--seq-len",
        "16",
        "--seconds",
        "0.001",
        "--rounds",
        "1",
        "--least",
        "0",
        *keys,
    ]
    monkeypatch.setattr(sys, "argv", ["matmuls.py", *words])
    matmuls.main()
    *lines, last = capsys.readouterr().out.splitlines()
    flops = 6 * count_parameters(resolve_model("llama3-1b", TINY)).matmul * 2 * 16
    assert last == f"{len(lines)} forms of matmuls, {flops / 1e12:.4g} TFLOP a step"
    assert all(" ms by torch, " in line for line in lines)
    # Gate and up of both layers.
    assert any(line.startswith("4 of 32 x 64 x 96 rc: ") for line in lines)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("by_rows", [(True, True), (True, False), (False, True)])
def test_a_matmul_is_recorded_as_it_is_computed(by_rows: tuple[bool, bool], accumulates: bool) -> None:
    form = Matmul(5, 7, 3, by_rows, torch.float32, torch.float32, accumulates)
    a, b, out = form.operands(DEVICE)
    with Recorder() as recorder:
        form.by_torch(a, b, out)
        first = out.clone()
        form.by_torch(a, b, out)
    assert recorder.found == {form: 2}
    assert torch.allclose(first, a @ b)
    assert torch.allclose(out, a @ b * (2 if accumulates else 1))


def test_a_sum_with_a_bias_is_another_operation() -> None:
    with Recorder() as recorder:
        torch.addmm(torch.zeros(3), torch.zeros(5, 7), torch.zeros(7, 3))
    assert not recorder.found

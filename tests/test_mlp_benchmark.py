"""The benchmark of a gated MLP times what this machine can compute, and says what it cannot."""

from __future__ import annotations

import sys

import pytest
import torch
from benchmarks import mlp
from torch import Tensor

from argosy.model.layers import MLP

SMALL = [*["--shape", "8", "16", "32"], "--seconds", "0.001"]


def printed(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["mlp.py", *words])
    mlp.main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "8 tokens, 16 to 32 and back, on cpu"
    return [line.split(maxsplit=1) for line in lines]


def test_every_round_times_both_passes_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(*SMALL, "--rounds", "2", monkeypatch=monkeypatch, capsys=capsys)
    assert [line[0] for line in lines] == ["apart", "beside"] * 2
    assert all(line[1].count(" ms") == 2 for line in lines[::2])
    assert all("no kernels" in line[1] for line in lines[1::2])


def test_only_one_of_the_forms_uses_the_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU both forms are timed."""
    asked: list[bool] = []

    def fused(self: MLP, x: Tensor, stream: Tensor | None = None) -> Tensor | None:
        asked.append(self.fuses_activation)
        return x * 2 if self.fuses_activation else None

    monkeypatch.setattr(MLP, "_fused", fused)
    monkeypatch.setattr("argosy.model.layers.use_kernel", lambda x: True)
    device = torch.device("cpu")
    for beside in (False, True):
        both = mlp.passes((8, 16, 32), device, beside=beside)
        assert both is not None
        for work in both:
            work()
    assert set(asked[:2]) == {False}
    assert set(asked[2:]) == {True}

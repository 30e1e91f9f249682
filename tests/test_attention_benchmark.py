"""The benchmark of attention times what this machine has in both orders, and says why it leaves out the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from benchmarks import attention, mlp

from argosy.compat import set_deterministic

SMALL = [*["--shape", "1", "128", "1", "1", "64"], "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.are_deterministic_algorithms_enabled()
    yield
    set_deterministic(before)


def printed(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Run the benchmark, and return back end, order and the rest of every line but the first."""
    monkeypatch.setattr(sys, "argv", ["attention.py", *words])
    attention.main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "1 x 128, 1 on 1 heads of 64, on cpu"
    return [[line[2:11].strip(), line[12:23].strip(), line[24:]] for line in lines]


def test_every_back_end_is_timed_in_both_orders_and_every_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(*SMALL, "--rounds", "2", monkeypatch=monkeypatch, capsys=capsys)
    timed = [line for line in lines if " ms (" in line[2]]
    assert [line[:2] for line in timed] == [["sdpa", "bits repeat"], ["sdpa", "any order"]] * 2
    assert all(line[2].count(" ms (") == 2 and " J)" not in line[2] for line in timed)
    # A reason is printed once, not in every round.
    reasons = [line for line in lines if line not in timed]
    assert len(reasons) == 2 * (len(attention.BACKENDS) - 1)
    assert "needs memory for all scores" in reasons[-1][2]


def test_only_deterministic_kernels_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(*SMALL, "--repeatable", monkeypatch=monkeypatch, capsys=capsys)
    assert {line[1] for line in lines} == {"bits repeat"}
    assert torch.are_deterministic_algorithms_enabled()


def test_joules_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(attention, "energy_counter", lambda device: lambda: 3.0 * len(calls))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cost = attention.timed(lambda: calls.append(None), torch.device("cpu"), 1e-4)
    assert cost.joules == pytest.approx(3.0)
    assert attention.Cost(0.002, 1.5).show(4e9) == "2.000 ms (2, 1.50 J)"


@pytest.mark.parametrize("words", ["1 2 3", "1 2 3 4 x", "", "1,2,3,4,5"])
@pytest.mark.parametrize(
    ("benchmark", "sizes"), [(attention, "BATCH TOKENS HEADS KV_HEADS HEAD_DIM"), (mlp, "TOKENS HIDDEN WIDTH")]
)
def test_a_shape_has_all_its_numbers(
    benchmark: ModuleType, sizes: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if benchmark is mlp:
        words = words.removesuffix(" 3")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--shape", *words.split()])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert f"--shape {sizes}" in capsys.readouterr().err

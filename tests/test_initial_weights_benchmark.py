"""The benchmark of initial weights draws what it says: all of a preset, or the blocks of one of several ranks."""

from __future__ import annotations

import sys

import pytest
from benchmarks import initial_weights

from argosy.model import build

KEYS = ["layers=1", "hidden=64", "heads=2", "vocab_size=1000"]


@pytest.mark.parametrize(("shards", "share"), [(1, 1.0), (4, 0.25)])
def test_it_draws_the_part_of_one_of_so_many_ranks(
    shards: int, share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, drawn = build._draw, list[int]()
    monkeypatch.setattr(build, "_draw", lambda rows, *more: (drawn.append(rows.numel()), draw(rows, *more)))
    monkeypatch.setattr(build, "_BLOCK", build._BLOCK)
    words = ["gpt2", *KEYS, "--rounds", "1", "--shards", str(shards), "--block", "64"]
    monkeypatch.setattr(sys, "argv", ["initial_weights.py", *words])
    initial_weights.main()
    spec = initial_weights.resolve_model("gpt2", KEYS)
    matrices = sum(p.numel() for p in build.build_model(spec, "meta").parameters() if p.ndim > 1)
    assert sum(drawn) == pytest.approx(share * matrices, rel=0.01)
    assert f"{shards} shards" in capsys.readouterr().out

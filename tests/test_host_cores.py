"""Cores of the host: what a container may use counts, not what the machine around it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argosy import host_cores
from argosy.data.prepare.work import PrepareOptions


def test_the_cores_there_are_are_those_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(host_cores, "_CPU_MAX", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    assert host_cores.available_cores() == 96
    for said, cores in (
        ("max 100000\n", 96),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9999900000 100000\n", 96),
    ):
        limit.write_text(said)
        assert host_cores.available_cores() == cores
    limit.write_text("800000 100000\n")
    assert PrepareOptions().workers == 8, "a data pod starts as many processes as its limit has cores"

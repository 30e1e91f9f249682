"""Memory of the host: what a container may take counts, not what the machine around it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy import host_memory


def test_the_memory_there_is_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    on_machine = host_memory.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 250000\n")
    assert host_memory.available_memory() == pytest.approx(on_machine, rel=0.5)
    (tmp_path / "memory.max").write_text("1000000\n")
    assert host_memory.available_memory() == 550_000

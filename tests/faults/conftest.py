from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults.bench import Bench, table_of

_benches: list[Bench] = []


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Bench:
    made = Bench(tmp_path_factory.mktemp("bench"), corpus)
    _benches.append(made)
    return made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for made in _benches:
        if made.table:
            terminalreporter.section("faults")
            terminalreporter.write_line(table_of(made.table))

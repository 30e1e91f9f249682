"""A run on storage that can be made slow or full while the run goes on, by a library that is preloaded into its processes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.bench import Bench

_SOURCE = Path(__file__).with_suffix(".c")


@contextmanager
def preloaded(bench: Bench, path: str) -> Iterator[tuple[dict[str, str], Callable[[str], None]]]:
    """Return the environment of such a run, and a function that commands files whose path contains `path`, as in storage.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("faulty storage is made by a C compiler, and there is none")
    library = bench.root / "storage.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    orders = bench.root / f"orders-{len(list(bench.root.glob('orders-*')))}"

    def give(order: str) -> None:
        partial = orders.with_suffix(".partial")
        partial.write_text(order)
        partial.rename(orders)

    give("")
    yield {"LD_PRELOAD": str(library), "FAULT_PATH": path, "FAULT_ORDERS": str(orders)}, give
    give("")

"""The shape of the source tree: files and functions stay short, and a file's name says which one it is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "argosy"
FILE_LINES, FUNCTION_LINES = 400, 60
LONG_FUNCTIONS_ALLOWED = ("cli/", "model/ops/kernels/")


def _sources() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path


def test_no_file_is_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in _sources()}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_no_function_is_long() -> None:
    long = {
        f"{name}:{node.name}"
        for name, path in _sources()
        if not name.startswith(LONG_FUNCTIONS_ALLOWED)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 >= FUNCTION_LINES
    }
    assert long == set()


def test_file_names_are_unique() -> None:
    counts = Counter(path.name for _, path in _sources() if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in counts.items() if count > 1] == []

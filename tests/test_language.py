"""Docstrings read as sentences: none begins with a word that leaves it without a subject."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "argosy"
FRAGMENTS = ("Of", "That", "Those", "As", "Until", "Since")
# Folders that still have such docstrings. Take one out when it has none.
NOT_YET = ("model/",)


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def fragments(code: str) -> list[int]:
    """Return the lines of docstrings that begin as a fragment."""
    return [line for line, text in docstrings(code) if text.split()[0].strip(",:;.") in FRAGMENTS]


def test_no_docstring_begins_as_a_fragment() -> None:
    names = [path.relative_to(SOURCE).as_posix() for path in sorted(SOURCE.rglob("*.py"))]
    found = [f"{name}:{line}" for name in names for line in fragments((SOURCE / name).read_text())]
    assert not found, f"say what the thing returns or does: {', '.join(found)}"


def test_the_lint_finds_a_fragment_wherever_a_docstring_can_be() -> None:
    code = '"""Of a run."""\nclass A:\n    """Since then."""\n    async def f(self):\n        """Until: the end."""\n'
    assert fragments(code) == [1, 3, 5]
    assert not fragments('def f():\n    """Return those that are left, as text."""\n')

"""Every file of tests is collected: pytest passes over folders whose names it takes for build outputs, in silence."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from longest_first import LONGEST

TESTS = Path(__file__).parent


def test_no_folder_with_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.relative_to(TESTS).parts[:-1]}
    passed_over = [f for f in folders if any(fnmatch(f, p) for p in pytestconfig.getini("norecursedirs"))]
    assert "dist" in folders
    assert not passed_over


def test_the_files_that_are_to_run_first_are_there() -> None:
    assert not [file for file in LONGEST if not (TESTS / file).exists()]

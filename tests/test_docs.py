"""What is documented is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import parallelism_pictures
from typer.main import get_command

from argosy.cli.app import app
from argosy.cli.reference_page import reference_page
from argosy.config.other_names import OTHER_NAMES
from argosy.config.reference import keys, page
from argosy.errors import CODES, ArgosyError, errors_page

ROOT = Path(__file__).parents[1]
SOURCES = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "errors.py")


def test_the_error_index_is_made_from_the_codes() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == errors_page(), "run `make docs`"


def test_the_key_reference_is_made_from_the_schema() -> None:
    assert (ROOT / "docs" / "run-spec.md").read_text() == page(), "run `make docs`"


def test_the_command_reference_is_made_from_the_program() -> None:
    made = reference_page()
    assert (ROOT / "docs" / "cli.md").read_text() == made, "run `make docs`"
    for name in (*get_command(app).commands, "data prepare", "ckpt export"):  # type: ignore[attr-defined]
        assert f"### argosy {name}" in made, name


def test_every_code_is_used_and_every_used_code_is_known() -> None:
    raised = set(re.findall(r'ArgosyError\(\s*"([a-z.-]+)"', SOURCES)) | {
        code for code in CODES if f', "{code}"' in SOURCES or f'"{code}" if' in SOURCES or f'else "{code}"' in SOURCES
    }
    assert raised == set(CODES)


def test_an_unknown_code_is_a_bug() -> None:
    with pytest.raises(KeyError):
        ArgosyError("no.such-code", "x", fix="y")


def test_links_in_the_pages_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_architecture_page_lists_every_folder() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    for package in (ROOT / "src" / "argosy").rglob("__init__.py"):
        assert f"{package.parent.name}/" in tree, f"{package.parent} is not in docs/architecture.md"


def test_every_file_that_the_architecture_page_names_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(\w+/[\w/]+\.\w+)`", page)
    assert len(named) > 60
    missing = {name for name in named if not (ROOT / "src" / "argosy" / name).exists()}
    assert not missing


def test_the_pictures_of_layouts_are_made_by_their_script() -> None:
    for name, text in parallelism_pictures.pictures().items():
        assert (ROOT / "docs" / "images" / name).read_text() == text, "run `make docs`"


def test_words_of_other_frameworks_lead_to_keys_that_exist() -> None:
    known = {key.replace(".0.", ".") for key, *_ in keys()} | {"data.train"}
    rows = re.findall(r"^\| (`[^|]*) \|([^\n]*)\|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    for ours, theirs in rows:
        named = re.findall(r"`([^`]+)`", ours)
        assert set(named) <= known, f"no such key: {ours}"
        if "batch" in ours:  # the same word is the global batch of one framework and the micro-batch of another
            continue
        for word in re.findall(r"`(?:--)?([\w-]+)`", theirs):
            other = OTHER_NAMES.get(word.replace("-", "_"))
            assert other is None or other in named, f"{word} is {other}, not {ours}"


def test_no_pickle_and_no_unsafe_loading_in_the_sources() -> None:
    for pattern in (
        r"\bimport pickle\b",
        r"torch\.load\(",
        r"yaml\.load\(",
        r"(?<![.\w])eval\(",
        r"(?<![.\w])exec\(",
        r"shell=True",
        r"\.cuda\(",
    ):
        assert not re.search(pattern, SOURCES), pattern


def test_no_bare_assert_on_a_users_path() -> None:
    assert not re.search(r"^\s*assert ", SOURCES, re.MULTILINE)

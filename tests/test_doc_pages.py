"""Every command of README and docs is run, or marked with what it needs; what pages show as output is what commands print."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import forking
from doc_pages import ROOT, Block, blocks, differences, environment, outputs, pages, shorter, with_outputs
from doc_setting import make_first_run, write_texts

# Scenarios of clusters need more around them: other tests run them (test_guides.py).
SCENARIOS = ("gpt3-on-aks", "mpt-on-aks", "llama-on-eks", "gpt3-on-hyperpod", "parallelism-lab", "launching")
RUN_HERE = [p for p in pages() if p.stem not in SCENARIOS and any(b.language == "sh" for b in blocks(p.read_text()))]
_COMMAND = re.compile(r"^(\$ )?(argosy|pip|make|git|python3?|kubectl|helm|docker|hf|torchrun) ", re.MULTILINE)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forking.command(tmp_path_factory.mktemp("bin")) as path:
        yield path


@pytest.fixture(scope="module")
def after_first_run(tmp_path_factory: pytest.TempPathFactory, forked: Path) -> Path:
    place = tmp_path_factory.mktemp("setting")
    write_texts(place / "work", 150)
    make_first_run(place / "work", environment(place / "bin", forked))
    return place / "work"


@pytest.mark.parametrize("path", RUN_HERE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    path: Path, tmp_path: Path, forked: Path, after_first_run: Path
) -> None:
    page, work = path.read_text(), tmp_path / "work"
    if any(block.title == "run.yaml" for block in blocks(page)):  # it begins at the texts
        write_texts(work, 150)
    else:
        shutil.copytree(after_first_run, work, symlinks=True)
    # Importing transformers takes 4 s of each export; tests/checkpoint compare exports with it.
    hidden = "transformers" if "argosy ckpt export" in page else ""
    printed = outputs(page, work, environment(tmp_path / "bin", forked, shorter(page), hidden=hidden))
    assert differences(page, printed) == [], "the program prints something else now: run `make tutorials`"


def says_what_it_needs(page: str, block: Block) -> bool:
    """True if the title of a `console` block, or a sentence of its page, says what it needs."""
    return block.title.startswith("needs ") or re.search(r"`console`\s+blocks?\b", page) is not None


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_block_is_run_or_says_what_it_needs(path: Path) -> None:
    page = path.read_text()
    for block in blocks(page):
        where = f"{path.name}:{block.line}"
        if block.language == "console":
            assert says_what_it_needs(page, block), f"{where} does not say what it needs"
        elif block.language != "sh":
            assert not _COMMAND.search(block.text), f"{where} has commands: mark it `sh` or `console`"


def test_a_block_that_nobody_runs_is_found() -> None:
    page = '```\nargosy plan x\n```\n\n```console title="needs a GPU"\nargosy bench\n```\n'
    plain, marked = blocks(page)
    assert _COMMAND.search(plain.text)
    assert says_what_it_needs(page, marked)
    assert not says_what_it_needs(page, Block("console", "", "", 1, (0, 0)))


def test_an_output_that_is_no_longer_printed_is_found_and_can_be_written_anew() -> None:
    page = '```sh\nargosy x\n```\n\n```text title="output"\nloss 1.5 in 3m20s\n…\nold words\n```\n'
    printed = {1: "loss 0.75 in 12s\nnew words\n"}
    assert differences(page, printed) == ["line 5: old words"]
    assert differences(with_outputs(page, printed), printed) == []

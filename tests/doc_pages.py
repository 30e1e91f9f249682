"""The pages of the documentation as programs: their blocks are run as they stand, in order, in one directory for each page.

- A `sh` block is run. A page may shorten training for tests with a comment: `<!-- tests train with train.tokens=8K -->`.
- A `yaml` block with a title is a file, which later commands read.
- A `text` block titled "output" is what the block before it printed. Tests compare it line by line, with all numbers left out;
  `python tests/doc_pages.py PAGE...` runs the page in full and writes its outputs anew.
- A `text` block titled "for example" is written anew too, and not compared: what a model writes differs between machines.
- A `console` block needs a part that is not here. Its title, or a sentence of the page, says which.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forking

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHORTER = re.compile(r"<!-- tests train with (.*?) -->")
_MARK = "@@ end of block"
_MOST_LINES = 24  # of an output that is written into a page


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    line: int
    span: tuple[int, int]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> Iterator[Block]:
    for found in _FENCE.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        yield Block(found[1], found[2] or "", found[3], line, found.span(3))


def outputs(page: str, directory: Path, environment: dict[str, str]) -> dict[int, str]:
    """Run the page's commands in a directory. Returns what each `sh` block printed, by its line."""
    lines = ["set -eu", "exec 2>&1"]
    ran = []
    for block in blocks(page):
        if block.language == "yaml" and block.title:
            lines.append(f"cat > {shlex.quote(block.title)} <<'END OF FILE'\n{block.text}END OF FILE")
        elif block.language == "sh":
            lines.append(f"{block.text}\necho '{_MARK}'")
            ran.append(block.line)
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=directory, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"the block after line {ran[done.stdout.count(_MARK)]}:\n{done.stdout[-3000:]}"
    return dict(zip(ran, done.stdout.split(f"{_MARK}\n"), strict=False))


def shorter(page: str) -> str:
    """Return the overrides that tests add to `argosy train` of a page."""
    found = _SHORTER.search(page)
    return found[1] if found else ""


def masked(line: str) -> str:
    """Return a line without its numbers, durations, bars and spacing."""
    line = re.sub(r"[\u2500-\u25ff\u2800-\u28ff]+", " ", line)
    line = re.sub(r"\b[0-9a-f]{12,}\b", "#", line)
    line = re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?", "#", line)
    line = re.sub(r"#(?: ?[KMGTB]i?B?\b| ?(?:ms|min|[dhms])\b)?(?:#(?:ms|min|[dhms]))*", "#", line)
    return " ".join(line.split())


def differences(page: str, printed: dict[int, str]) -> list[str]:
    """Return the lines of the page's outputs that its commands did not print."""
    wrong, before = [], 0
    for block in blocks(page):
        if block.language == "sh":
            before = block.line
        elif (block.language, block.title) == ("text", "output"):
            real = {masked(line) for line in printed[before].splitlines()}
            shown = [line for line in block.text.splitlines() if line.strip() not in ("", "…")]
            wrong += [f"line {block.line}: {line}" for line in shown if masked(line) not in real]
    return wrong


def with_outputs(page: str, printed: dict[int, str]) -> str:
    """Return the page with the outputs of this run."""
    before, changes = 0, []
    for block in blocks(page):
        if block.language == "sh":
            before = block.line
        elif block.language == "text" and block.title in ("output", "for example"):
            changes.append((block.span, _cut(printed[before])))
    for (start, end), text in reversed(changes):
        page = page[:start] + text + page[end:]
    return page


def _cut(text: str) -> str:
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 2], "…", *lines[-_MOST_LINES // 2 :]]
    return "\n".join(lines) + "\n"


def environment(directory: Path, forked: Path, overrides: str = "", hidden: str = "") -> dict[str, str]:
    """Write an `argosy` that adds overrides to `argosy train` and `argosy sweep` into a new directory. Returns the environment in which pages find it.

    `forked` is the command that `forking.command` made, and `hidden` a package that is treated as not installed.
    """
    directory.mkdir()
    if hidden:
        (directory / "sitecustomize.py").write_text(f"import sys\nsys.modules[{hidden!r}] = None\n")
    path = directory / "argosy"
    path.write_text(
        f'#!/bin/sh\ncase "$1" in train|sweep) exec {forked} "$@" {overrides} ;; esac\nexec {forked} "$@"\n'
    )
    path.chmod(0o755)
    paths = {name: f"{directory}:{os.environ.get(name, '')}" for name in ("PATH", "PYTHONPATH")}
    return os.environ | paths | {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Run pages in full, one after the other in one directory, and write their outputs anew."""
    from doc_setting import write_texts

    with tempfile.TemporaryDirectory() as place, forking.command(Path(place)) as forked:
        found = environment(Path(place, "bin"), forked)
        write_texts(Path(place, "work"), 20_000)
        for path in map(Path, sys.argv[1:]):
            text = path.read_text()
            path.write_text(with_outputs(text, outputs(text, Path(place, "work"), found)))


if __name__ == "__main__":
    main()

"""Non-ASCII text and names in a POSIX locale, and bytes that are not text, work or are refused readably."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.data.text.tokenizer import train_bpe
from argosy.errors import ArgosyError
from argosy.infer.generate import _utf8, sample
from argosy.model.decoding import Sampling


def argosy(*arguments: str | bytes, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    command: list[str | bytes] = [sys.executable, "-m", "argosy", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, env=known | {"LC_ALL": "C"} | environment)


def test_names_beyond_ascii_work_where_python_was_told_to_know_ascii_only(tmp_path: Path) -> None:
    (tmp_path / "Köln – 漢字.txt").write_text("Grüße 👋\n", encoding="utf-8")
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    names = ("Köln – 漢字.txt", "--tokenizer", "bytes", "--output", "korpus-ü", "--workers", "1")
    done = argosy("data", "prepare", *names, cwd=tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert b"korpus-?: 1 documents" in done.stdout
    assert (tmp_path / "korpus-ü" / "manifest.json").is_file()


def test_bytes_that_are_no_text_are_refused_and_not_traced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words\n")
    (tmp_path / "tokenizer.json").write_text(train_bpe(["some words"], 257), encoding="utf-8")
    named = ("a.txt", "--tokenizer", "tokenizer.json", "--output", "out", "--eod", b"\xff\xfe")
    done = argosy("data", "prepare", *named, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"error[")


def test_a_prompt_in_a_locale_without_its_letters_is_the_text_its_bytes_are() -> None:
    given = "Grüße 漢 👋"
    as_python_has_it = given.encode().decode("ascii", "surrogateescape")
    assert as_python_has_it != given
    assert _utf8(as_python_has_it) == _utf8(given) == given


@pytest.mark.parametrize("prompt", ["ab\udcff", "\udcc3"])
def test_a_prompt_that_is_no_text_is_refused_before_a_model_is_looked_for(prompt: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        sample("no/such/run", prompt, Sampling())
    assert (refused.value.code, refused.value.key) == ("config.bad-value", "--prompt")
    assert "not UTF-8" in refused.value.cause

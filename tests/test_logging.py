"""Argosy is quiet as a library, and the command line shows its notes and warnings on standard error."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.log_handler import StderrHandler, install_log_handler

# The file is a directory: the writer warns once, and the caller goes on.
USE = """
import sys
from pathlib import Path
from argosy.record.jsonl import JsonlWriter
with JsonlWriter(Path(sys.argv[1])) as writer:
    writer.write({"step": 1})
    writer.write({"step": 2})
"""


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)


def test_a_library_user_who_has_not_set_up_logging_sees_nothing(tmp_path: Path) -> None:
    done = run(USE, tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_library_user_who_has_set_up_logging_gets_the_records(tmp_path: Path) -> None:
    done = run("import logging\nlogging.basicConfig()\n" + USE, tmp_path)
    assert done.stdout == ""
    assert done.stderr.count("WARNING:argosy.record.jsonl:") == 1
    assert "cannot be written" in done.stderr


def test_a_command_shows_a_warning_on_standard_error_as_it_did(
    write_spec: Callable[..., Path], tmp_path: Path, argosy: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    metrics.mkdir(parents=True)
    done = argosy("train", write_spec())
    assert done.returncode == 0, done.stderr
    assert "warning: runs/tiny/metrics.jsonl cannot be written" in done.stderr.replace(f"{tmp_path}/", "")
    assert "cannot be written" not in done.stdout


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (logging.DEBUG, ""),
        (logging.INFO, "note: a\nb\n"),
        (logging.WARNING, "warning: a\nb\n"),
        (logging.ERROR, "a\nb\n"),
    ],
)
def test_a_level_is_shown_as_a_prefix(level: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("argosy")
    before, level_before = list(logger.handlers), logger.level
    try:
        install_log_handler()
        install_log_handler()
        logging.getLogger("argosy.some.room").log(level, "%s\n%s", "a", "b")
    finally:
        logger.handlers = before
        logger.setLevel(level_before)
    assert capsys.readouterr() == ("", shown)


def test_a_closed_standard_error_does_not_reach_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = (tmp_path / "closed").open("w")
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    StderrHandler().emit(logging.makeLogRecord({"msg": "nobody reads this", "levelno": logging.WARNING}))

"""A forked command is a process like any other to the test that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forking
from forking import ARGOSY, Popen
from waiting import PATIENCE_S, has_ended, wait_for


def waiting(tmp_path: Path, **options: object) -> Popen:
    """A command that reads its standard input to the end."""
    (tmp_path / "run").mkdir()
    words = ["doctor", str(tmp_path / "run"), "--log", "-"]
    return Popen([*ARGOSY, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


def test_it_is_a_child_of_this_process_under_its_own_command_line_and_session(tmp_path: Path) -> None:
    with waiting(tmp_path, start_new_session=True) as process:
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"PPid:\t{os.getpid()}\n" in status
        assert os.getsid(process.pid) == process.pid
        shown = Path(f"/proc/{process.pid}/cmdline")
        wait_for(lambda: shown.read_bytes().rstrip(b"\0").split(b"\0")[1:4] == [b"-m", b"argosy", b"doctor"])
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_server_of_its_own_ends_with_it(tmp_path: Path) -> None:
    with waiting(tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        [server] = wait_for(lambda: children.read_text().split())
        process.kill()
    wait_for(lambda: has_ended(int(server)))


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["no-such-verb"], 2)])
def test_a_shell_script_gets_output_and_exit_code(words: list[str], code: int, tmp_path: Path) -> None:
    with forking.command(tmp_path) as path:
        done = subprocess.run(
            ["sh", "-c", f'"$0" {words[0]} | cat; "$0" {words[0]} >&2', path], capture_output=True, text=True
        )
    assert done.returncode == code
    assert ("argosy " in done.stdout) == (code == 0)
    assert done.stderr


def test_directory_and_environment_are_those_it_was_given(write_spec: Callable[..., Path], tmp_path: Path) -> None:
    write_spec()
    words = ["config", "show", "run.yaml"]
    assert forking.run(words, cwd=tmp_path).returncode == 0
    assert forking.run(words, cwd=tmp_path.parent).returncode == 2
    refused = forking.run(
        ["train", *words[2:], "--dry-run"], cwd=tmp_path, env=os.environ | {"RANK": "2", "WORLD_SIZE": "2"}
    )
    assert "RANK is 2" in refused.stderr


def test_programs_are_forked_too_with_their_arguments(tmp_path: Path) -> None:
    code = "import sys; print(__name__, sys.argv)"
    (tmp_path / "program.py").write_text(code)
    for words, argv in ((["-c", code, "a"], ["-c", "a"]), ([str(tmp_path / "program.py"), "a"], None)):
        with forking.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0] == f"__main__ {argv or words}\n"

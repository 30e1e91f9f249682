"""From `argosy train run.yaml` to its first step: every check once, the data opened once, and few files on the way."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import forking
from ports import free_port
from waiting import PATIENCE_S

Write = Callable[..., Path]

# Runs the command line, and writes which functions of Argosy it calls: in all, and until its first step. What runs while a module
# is being imported does not count.
TRACE = """
import atexit, inspect, json, runpy, sys
out, *sys.argv[1:] = sys.argv[1:]
calls, before = [], []
def imported(frame):
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.endswith(".py") and not code.co_filename.endswith(("__main__.py", "trace.py", "forking.py")):
            return True
        frame = frame.f_back
    return False
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and "/src/argosy/" in code.co_filename and code.co_flags & inspect.CO_OPTIMIZED and not imported(frame):
        calls.append(code.co_filename.split("/src/argosy/")[1] + ":" + code.co_qualname)
        if code.co_name == "take_step" and not before:
            before.extend(calls)
atexit.register(lambda: open(out, "w").write(json.dumps({"calls": sorted(set(calls)), "before": before})))
sys.setprofile(note)
runpy.run_module("argosy", run_name="__main__")
"""
# Called once for each of several things: values of the spec, splits of the data, files, ranks and nodes.
OF_MANY = {
    "refuse_bool", "Windows.require_one", "_require_regular", "open_regular", "read_regular", "_require_address", "_require_inside",
}  # fmt: skip
OPENED = (
    "open_data",
    "open_corpus",
    "load_tokenizer",
    "RunData.training",
    "RunData.each",
    "find_world",
    "prepare_device",
)
BUILT = ("open_session", "parallelize", "build_model", "Trainer.__init__", "Optimizer.__init__")
FIRST_RANK_ONLY = ("machine_facts",)
MOST_FILES = 100


class Trace(NamedTuple):
    files: set[str]
    # Function and how often it was called before the first step.
    before: dict[str, int]


def trace(spec: Path, *overrides: str, ranks: int = 1) -> list[Trace]:
    program, port = spec.parent / "trace.py", str(free_port())
    program.write_text(TRACE)
    started = []
    for rank in range(ranks):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        environment = os.environ | ({key: str(value) for key, value in world.items()} if ranks > 1 else {})
        command = [sys.executable, str(program), str(spec.parent / f"trace{rank}.json"), "train", str(spec), "--quiet"]
        started.append(forking.Popen([*command, *overrides], env=environment))
    assert [process.wait(PATIENCE_S) for process in started] == [0] * ranks
    return [_read(spec.parent / f"trace{rank}.json") for rank in range(ranks)]


def _read(path: Path) -> Trace:
    found: dict[str, Any] = json.loads(path.read_text())
    counts: dict[str, int] = {}
    for call in found["before"]:
        counts[call] = counts.get(call, 0) + 1
    return Trace({call.partition(":")[0] for call in found["calls"]}, counts)


def _is_check(call: str) -> bool:
    return call.rpartition(":")[2].rpartition(".")[2].lstrip("_").startswith(("check_", "require_", "refuse_"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_makes_every_check_once_and_opens_and_builds_everything_once(ranks: int, write_spec: Write) -> None:
    for rank, found in enumerate(trace(write_spec(), f"parallel.dp_replicate={ranks}", ranks=ranks)):
        checks = {call: n for call, n in found.before.items() if _is_check(call) and n > 1}
        assert {call.rpartition(":")[2] for call in checks} <= OF_MANY
        assert sum(map(_is_check, found.before)) > 20
        by_name = {call.rpartition(":")[2]: n for call, n in found.before.items()}
        once = (*OPENED, *BUILT, *(FIRST_RANK_ONLY if rank == 0 else ()))
        assert {name: by_name.get(name) for name in once} == dict.fromkeys(once, 1)


def test_a_plain_run_passes_few_files(write_spec: Write) -> None:
    [found] = trace(write_spec())
    assert len(found.files) < MOST_FILES, sorted(found.files)

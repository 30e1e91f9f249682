"""Shared by all tests: a small prepared corpus, a way to write run specs, and the command line as users call it."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, settings

import forking
import longest_first
from programs import not_available
from tiny import TINY_MODEL

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two threads that wait for each other on busy cores make a step of a tiny model take up to five times as long. Processes that tests
# start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels are interpreted; Triton reads this when it is imported

# No property is about time: a busy machine is no counter-example. A test that suppresses other checks has to repeat this one.
settings.register_profile("argosy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("argosy")

MANY_MODULES = 50
_frozen_modules = 0
LEFT_OUT = not_available(platform.machine())
collect_ignore = [file for file, _ in LEFT_OUT]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    for file, program in LEFT_OUT:
        terminalreporter.write_line(f"not available on {platform.machine()}: {program}; tests/{file} was left out")
    if os.environ.get("CI") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("a skipped test is a failure in CI: install what it needs in .ci/run", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: longest_first.place(item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Training collects garbage before its first step: a third of a second for what the test modules have imported, and most tests
    train for less. What is here once tests are collected stays out of it. What a training would freeze is not: a model that was in
    a cycle by then would stay for good, with its process groups and their threads."""
    _freeze_imported()
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


def _freeze_imported(freeze: Callable[[], None] = gc.freeze) -> None:
    global _frozen_modules
    gc.collect()
    freeze()
    _frozen_modules = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws does not depend on which tests ran before it in the same process, and what they imported (the compiler, a
    model of transformers) is no more walked than what was collected."""
    if len(sys.modules) - _frozen_modules > MANY_MODULES:
        _freeze_imported()
    random.seed(0)
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _forget_file_systems() -> Iterator[None]:
    """fsspec keeps file systems by their arguments: one would still speak to the server that another file of tests had started."""
    yield
    if (known := sys.modules.get("fsspec.registry")) is not None:
        for system in set(known._registry.values()):
            system.clear_instance_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 40 documents of pseudo-text as bytes, with a manifest."""
    from argosy.data.prepare.job import prepare
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.tokenizer import ByteTokenizer

    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 8, 50)]
    with (root / "text.jsonl").open("w") as file:
        for _ in range(40):
            text = " ".join(words[i] for i in rng.integers(0, 50, int(rng.integers(80, 160))))
            file.write(json.dumps({"text": text}) + "\n")
    prepare([str(root / "text.jsonl")], ByteTokenizer(), root / "prepared", PrepareOptions())
    return root / "prepared"


@pytest.fixture
def write_spec(tmp_path: Path, corpus: Path) -> Callable[..., Path]:
    """Write a small run spec; keyword arguments replace whole sections."""

    def write(**sections: Any) -> Path:
        spec: dict[str, Any] = {
            "name": "tiny",
            "runs_dir": str(tmp_path / "runs"),
            "model": TINY_MODEL,
            "data": {"train": str(corpus), "seq_len": 32, "split": [90, 10, 0]},
            "train": {"global_batch": 8, "steps": 6},
            "optim": {"lr": 1e-3, "warmup": 2},
            "parallel": {"micro_batch": 4},
            "eval": {"every": 3, "batches": 2},
            "checkpoint": {"every": 2, "keep": 3, "mode": "sync"},  # which saves there are does not depend on the disk
            "log": {"every": 1},
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(spec | sections))
        return path

    return write


@pytest.fixture
def argosy(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command as a user would, in an empty directory, with options of `subprocess.run`."""

    def run(
        *arguments: object, cwd: Path = tmp_path, timeout: float = 240, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return forking.run([str(a) for a in arguments], timeout, cwd=cwd, **options)

    return run

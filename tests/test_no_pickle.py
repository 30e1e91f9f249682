"""No pickle: the lint that `make check` runs refuses every way to read or send one, and ranks exchange none. It also refuses batches
of messages, for which NCCL waits until every rank of the group joins."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from argosy.compat import messages
from argosy.parallel.host_group import all_gather_json

ROOT = Path(__file__).parents[1]
PLANTED = [
    "import pickle",
    "import _pickle",
    "from pickle import loads",
    "import shelve",
    "import marshal",
    "import dill",
    "import cloudpickle",
    "import joblib",
    "import multiprocessing",
    "import torch\n\ntorch.load('x')",
    "import torch\n\ntorch.save({}, 'x')",
    "from torch import load",
    "import numpy as np\n\nnp.load('x', allow_pickle=True)",
    "import torch.distributed as dist\n\ndist.all_gather_object([], 1)",
    "import torch.distributed as dist\n\ndist.broadcast_object_list([])",
    "from torch.distributed import gather_object",
    "from torch.distributed.distributed_c10d import scatter_object_list",
    "import torch.distributed.checkpoint as dcp",
    "from concurrent.futures import ProcessPoolExecutor",
    "import torch.distributed as dist\n\ndist.batch_isend_irecv([])",
    "from torch.distributed import batch_isend_irecv",
]


def test_the_lint_refuses_everything_planted_and_nothing_else(tmp_path: Path) -> None:
    """With ruff's settings as `make check` has them."""
    clean = "import numpy as np\nimport torch\n\nprint(torch.zeros(1), np.zeros(1))"
    names = {f"planted_{number}.py": code for number, code in enumerate(PLANTED)} | {"clean.py": clean}
    for name, code in names.items():
        (tmp_path / name).write_text(code + "\n")
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--select", "TID251"]
    done = subprocess.run([*command, "--output-format", "json", str(tmp_path)], capture_output=True, text=True)
    found = {Path(fault["filename"]).name for fault in json.loads(done.stdout) if fault["code"] == "TID251"}
    assert {names[name] for name in found} == set(PLANTED)
    assert "TID251" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]


def test_make_check_runs_the_lint() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = {name: makefile.partition(f"\n{name}:")[2].partition("\n\n")[0] for name in ("test", "check", "lint")}
    assert "ruff check --no-cache ." in recipes["lint"]
    assert "lint" in recipes["check"].split()
    assert "lint" in recipes["test"].split()


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("a pickle was run",)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of one rank, whose object collectives are as torch has them until a test seals them."""
    monkeypatch.setattr(distributed_c10d, "_pickler", pickle.Pickler)
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ranks_exchange_json_and_torchs_object_collectives_are_shut(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"metrics": ["loss", "ä"], "load": [2, 4], "none": None}
    assert all_gather_json(said) == [said]
    found: list[Any] = [None]
    messages.refuse_pickled_messages()
    for objects in (lambda: dist.all_gather_object(found, Bomb()), lambda: dist.broadcast_object_list([Bomb()], 0)):
        with pytest.raises(RuntimeError, match="never pickles"):
            objects()
    assert "a pickle was run" not in capsys.readouterr().out

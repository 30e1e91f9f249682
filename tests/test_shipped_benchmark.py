"""The benchmark of presets as shipped compares like with like, and keeps what it has measured."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks import shipped
from torch import Tensor, nn

MEASURED = {"step_s": 0.01, "micro_batch": 4, "precision": "fp32"}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # It is run as a script, beside shipped.py.
    monkeypatch.syspath_prepend(str(Path(shipped.__file__).parent))
    yield importlib.import_module("peers")
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ("auto", torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp8", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_peers_compute_in_the_precision_of_argosy(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, dtype: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            out = torch.ones(4, 4) @ self.weight
            seen.append(out.dtype)
            return out.float().mean()

    monkeypatch.setitem(peers.LOOPS, "plain", lambda work, device: Loop())
    found = peers.time_steps("plain", peers.WORKS["smoke"], 4, 2, asked)
    assert set(seen) == {dtype}
    assert found["precision"] == {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


@pytest.mark.parametrize("steps", [2, 7, 8])
def test_peers_report_the_median_of_the_second_half(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    seconds = [float((7 * step) % 5 + 1) for step in range(steps)]
    ticks = iter([tick for each in seconds for tick in (0.0, each)])
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setitem(peers.LOOPS, "plain", lambda work, device: _constant())
    assert peers.time_steps("plain", peers.WORKS["smoke"], 4, steps)["step_s"] == statistics.median(
        seconds[steps // 2 :]
    )


def _constant() -> Any:
    loop: Any = lambda tokens, labels: loop.weight.sum()  # noqa: E731
    loop.weight = nn.Parameter(torch.ones(1))
    loop.parameters = lambda: [loop.weight]
    return loop


def _main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shipped.py", *words])
    try:
        shipped.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "'nosuch' is none of gpt2, "),
        (["smoke", "--only", "argosy,nosuch"], "'nosuch' is none of argosy, floor, plain, transformers"),
        (["smoke", "--steps", "19"], "19 is below 20: metrics are means of 10 steps"),
    ],
)
def test_the_benchmark_refuses_what_it_cannot_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert _main(monkeypatch, *words) == 2
    assert said in capsys.readouterr().err


def test_a_failed_run_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train(name: str, *_: object) -> dict[str, Any]:
        if name == "gpt2":
            raise shipped.RunFailed(
                "argosy train\nerror[data.not-found]\n  cause  there is no a|b\n  fix    check the path\n"
            )
        return dict(MEASURED)

    def peer(loop: str, *_: object) -> dict[str, Any]:
        if loop == "plain":
            raise shipped.RunFailed("Traceback\nImportError: no such module\n")
        return dict(MEASURED)

    monkeypatch.setattr(shipped, "train", train)
    monkeypatch.setattr(shipped, "peer", peer)
    assert (
        _main(
            monkeypatch,
            "smoke",
            "gpt2",
            "smoke",
            "--only",
            "argosy,plain,transformers",
            "--json",
            str(tmp_path / "all.json"),
        )
        == 1
    )
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 8
    assert {row.replace("\\|", "").count("|") for row in rows} == {len(shipped.COLUMNS) + 1}
    assert r"failed |  |  |  |  |  | there is no a\|b |" in rows[5]
    assert "ImportError: no such module" in rows[3]
    assert all("| fp32 | 10.0 ms |" in rows[row] for row in (2, 4, 7))
    kept = json.loads((tmp_path / "all.json").read_text())
    assert kept["smoke"]["argosy"] == MEASURED
    assert "there is no a|b" in kept["gpt2"]["argosy"]["error"]


def test_peers_are_asked_for_the_precision_that_argosy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(shipped, "peer", lambda loop, name, steps, precision: asked.append(precision) or dict(MEASURED))
    _main(monkeypatch, "smoke", "--only", "plain")
    _main(monkeypatch, "smoke", "--only", "plain", "--key", "train.precision=bf16")
    _main(monkeypatch, "smoke", "--only", "plain", "--key", "train.precision=bf16", "--precision", "fp8")
    assert asked == ["auto", "bf16", "fp8"]


def test_an_error_of_argosy_has_what_it_printed() -> None:
    with pytest.raises(shipped.RunFailed, match=r"error\[config"):
        shipped.argosy("config", "show", "nosuch.yaml")


def test_the_floor_is_that_of_the_same_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of `argosy bench` with the run's micro-batch, and not for works that it cannot do."""
    asked: list[tuple[object, ...]] = []

    def argosy(*words: object) -> str:
        asked.append(words)
        return json.dumps({"floor_ms": 4.0, "step_ms": 5.0, "micro_batch": 2, "precision": "bf16"}) + "\na warning\n"

    monkeypatch.setattr(shipped, "train", lambda *_: dict(MEASURED) | {"micro_batch": 2})
    monkeypatch.setattr(shipped, "argosy", argosy)
    words = ["llama3-8b-shape-fp8", "llama3-1b-documents", "--only", "argosy,floor", "--key", "optim.lr=1e-4"]
    assert _main(monkeypatch, *words) == 0
    (one,) = asked
    assert [str(word) for word in one] == [
        "bench", "llama3-8b", "--batch", "2", "--seq-len", "8192", "--micro-batch", "2", "--steps", "15", "--json", "train.deterministic=true",
        "model.layers=8", "train.precision=fp8", "optim.lr=1e-4",
    ]  # fmt: skip
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[1] for row in rows[2:]] == ["argosy optim.lr=1e-4", "floor", "argosy optim.lr=1e-4"]
    assert "| bf16 | 4.0 ms | 4096.0K |" in rows[3]
    # A peer's micro-batch is its own.
    monkeypatch.setattr(shipped, "peer", lambda *_: dict(MEASURED) | {"micro_batch": 1})
    assert _main(monkeypatch, "gpt2", "--only", "plain,floor") == 1
    assert len(asked) == 1
    assert "there is no run of argosy before it" in capsys.readouterr().out

"""What a run says of its device's memory, and what it refuses to try."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from argosy.cli.app import ran_out_of_memory
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.train import device as training_device
from argosy.train.device import Memory, require_memory

Argosy = Callable[..., "CompletedProcess[str]"]


def spec_of(*overrides: str) -> RunSpec:
    given = ["data.train=nowhere", "train.global_batch=1", "train.steps=1", "optim.lr=1e-4", *overrides]
    return resolve(None, given).spec


def test_a_model_larger_than_the_device_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, adamw = torch.device("cpu"), spec_of("model=gpt2")
    monkeypatch.setattr(training_device, "available_memory", lambda: 124_439_808 * 16 - 1)
    with pytest.raises(ArgosyError, match=r"124,439,808 parameters x 16 bytes .* are 1\.9 GiB") as refused:
        require_memory(adamw, cpu)
    assert refused.value.code == "device.out-of-memory"
    require_memory(adamw, cpu, ranks=2)
    require_memory(spec_of("model=gpt2", "optim.name=muon"), cpu)
    monkeypatch.setattr(training_device, "available_memory", lambda: 124_439_808 * 16)
    require_memory(adamw, cpu)


@pytest.mark.parametrize("verb", ["train", "train --dry-run", "bench"])
def test_a_model_that_no_machine_holds_is_refused_before_it_is_built(
    argosy: Argosy, write_spec: Callable[..., Path], verb: str
) -> None:
    huge = ["model.layers=100", "model.hidden=65536", "model.ffn=262144"]
    if verb == "bench":
        done = argosy(verb, "llama3-1b", *huge, "model.heads=64", "model.head_dim=1024", "--json")
    else:
        done = argosy(*verb.split(), write_spec(), *huge)
    assert done.returncode == 2, done.stderr
    assert "error[device.out-of-memory]" in done.stderr
    if verb == "bench":
        assert json.loads(done.stdout)["error"]["key"] == "model"


def test_a_step_that_runs_out_of_memory_ends_with_what_to_change(argosy: Argosy) -> None:
    tiny = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.vocab_size=128"]
    done = argosy("bench", "llama3-1b", *tiny, f"model.max_seq_len={2**20}", "--seq-len", 2**20, "--batch", 2**30)
    assert done.returncode == 2, done.stderr
    assert "error[device.out-of-memory]" in done.stderr
    assert "parallel.micro_batch" in done.stderr


def test_out_of_memory_is_told_from_other_failures() -> None:
    def asked(ask: Callable[[], Any]) -> bool:
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            ask()
        return ran_out_of_memory(raised.value)

    assert asked(lambda: torch.empty(2**58))
    assert asked(lambda: bytearray(2**62))
    assert not asked(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."))


def test_memory_is_told_in_a_unit_that_shows_every_part() -> None:
    small = Memory(peak=0.25, parameters=0.001, gradients=0.001, optimiser=0.002)
    assert str(small) == (
        "256.0 MiB at its peak: parameters 1.02, gradients 1.02, optimiser 2.05, activations and the rest 251.9"
    )
    large = Memory(peak=57.3, parameters=1.44, gradients=1.44, optimiser=8.65)
    assert str(large).startswith("57.3 GiB at its peak: parameters 1.44, gradients 1.44, optimiser 8.65")

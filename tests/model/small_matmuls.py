"""What the tests of the matmul kernels for Hopper share: whether they run here, and that they serve small shapes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from argosy.model.ops import beside, hopper
from argosy.model.ops.choice import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = beside._runs_on(DEVICE)


@contextmanager
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernels, or what the caller has put in their place, serve shapes that do not fill a GPU."""
    if not HOPPER:
        monkeypatch.setattr(beside, "gluon_refusal", lambda *_: None)
    # Tests are how a form gets to run with another version of Triton.
    monkeypatch.setattr(beside, "_LATER_FORMS", hopper.MEASURED)
    monkeypatch.setattr(beside, "_LEAST_FILLED", 0.0)
    _forget()
    yield
    _forget()


def fill_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels serve only what fills the multiprocessors of an H200."""
    monkeypatch.setattr(beside, "_LEAST_FILLED", 0.9)
    monkeypatch.setattr(beside, "processors", lambda device: 132)


def shifted(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight at an address that TMA cannot load from."""
    return torch.empty(weight.numel() + 1, device=DEVICE, dtype=weight.dtype)[1:].view(weight.shape).copy_(weight)


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with its columns, not its rows, next to each other in memory."""
    return weight.t().contiguous().t()


# What the kernels cannot load, by what is wrong with it.
UNLOADABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a shifted weight": shifted,
    "a transposed weight": transposed,
    "a weight of 32 bits": torch.Tensor.float,
}


# What does not fill a GPU, or has too few steps for what is computed beside them, by what is wrong with it.
TOO_SMALL: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "few tiles": fill_an_h200,
    "a small model": lambda monkeypatch: monkeypatch.setattr(beside, "_LEAST_DEPTH", 1024),
}


def trained(model: torch.nn.Module, *, decoded: bool = False) -> list[torch.Tensor]:
    """Return the loss of a model on a few tokens, and the gradients of its parameters."""
    torch.manual_seed(3)
    tokens, labels = torch.randint(0, 97, (2, 1, 4), device=DEVICE)
    model.zero_grad()
    with kernels(True):
        loss: Any = model(tokens, labels, **({"decoder_tokens": tokens.flip(1)} if decoded else {}))
        loss.total.backward()
    return [loss.total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _forget() -> None:
    for cached in (beside.fits, beside._runs_on, beside._runs_later_forms_on):
        cached.cache_clear()

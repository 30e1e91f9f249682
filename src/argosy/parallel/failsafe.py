"""Forward passes outside of training that may fail on one rank, and what the other ranks then do.

A pass of a sharded model is a collective: ranks wait for each other in it. With FSDP alone, this rank can keep up its part after a
failure, because the other ranks wait only for its shards. It all-gathers the units that are left without computing anything, and
then raises `PassFailedError`, so that all ranks can agree to give up. With tensor, pipeline, context or expert parallelism the
others wait for results that this rank does not have: the rank has to end, by `OutOfStepError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from argosy.parallel.mesh import Mesh

T = TypeVar("T")


class PassFailedError(Exception):
    """A forward pass failed on this rank, which has done its part of the collectives: it can go on."""


class OutOfStepError(Exception):
    """A forward pass failed on this rank, and the other ranks wait in it: this rank cannot go on."""


def run_pass(function: Callable[[], T]) -> T:
    """Run a function that makes a forward pass in which no other rank takes part."""
    return function()


def pass_runner(model: nn.Module, mesh: Mesh) -> Callable[[Callable[[], Any]], Any]:
    """Return the function that runs passes of a model in the layout of a mesh. What it is given has to make exactly one pass."""
    if mesh.size("tp", "pp", "cp") > 1 or mesh.experts is not None:
        return _or_end
    return _KeepingUp(model).run if mesh.has_fsdp else run_pass


def _or_end(function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:
        raise OutOfStepError(f"{type(error).__name__}: {error}") from error


class _KeepingUp:
    """Runs passes of an FSDP model. After a failure the units that are left are all-gathered and released, and compute nothing."""

    def __init__(self, model: nn.Module) -> None:
        from argosy.parallel.fsdp import units

        self._model = model
        every: list[Any] = units(model)
        self._blocks = [unit for unit in every if unit is not model]
        self._failure: str | None = None
        self._entered: set[nn.Module] = set()

    def run(self, function: Callable[[], T]) -> T:
        self._failure, self._entered = None, set()
        guarded: list[nn.Module] = [self._model, *self._blocks]
        own = {module: module.__dict__.get("forward") for module in guarded}
        for module in guarded:
            module.forward = self._guard(module)
        try:
            found = self._attempt(function)
            if self._failure is not None and self._model not in self._entered:
                self._model(None)
        except Exception as error:
            raise OutOfStepError(f"{type(error).__name__}: {error}") from error
        finally:
            for module, forward in own.items():
                del module.forward
                if forward is not None:
                    module.forward = forward
        if self._failure is not None:
            raise PassFailedError(self._failure)
        return found  # type: ignore[return-value]

    def _attempt(self, function: Callable[[], T]) -> T | None:
        """Return the result of a function, or None if it or anything in this pass has failed.

        Only the text of the exception is kept: its frames hold the memory that the rest of the pass may need.
        """
        if self._failure is None:
            try:
                return function()
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait
                self._failure = self._failure or f"{type(error).__name__}: {error}"
        return None

    def _guard(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward function of a unit, which FSDP's hooks surround: it never raises."""
        forward = module.forward

        def guarded(*inputs: Any, **named: Any) -> Any:
            self._entered.add(module)
            found = self._attempt(lambda: forward(*inputs, **named))
            if self._failure is None or module is not self._model:
                return found
            for block in self._blocks:
                if block not in self._entered:
                    block(None, None)
            return None

        return guarded

"""Garbage collection at chosen steps. Python's own starts whenever enough objects were made, walks everything the program
holds, and so makes single steps slow: on many ranks, each at another step, every step."""

from __future__ import annotations

import gc
from types import TracebackType

EVERY = 500  # steps


class StepwiseCollection:
    """`with StepwiseCollection() as collection:` … `collection.after(step)`."""

    def __enter__(self) -> StepwiseCollection:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()  # what exists now stays to the end of the run: no need to walk it again
        gc.disable()
        return self

    def after(self, step: int) -> None:
        if step % EVERY == 0:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

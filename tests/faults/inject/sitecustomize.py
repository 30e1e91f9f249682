"""Loaded by every Python process that has this directory on its path: plants the fault that ARGOSY_FAULT names.

`hold:rank:step` waits for the file that ARGOSY_HOLD names. `name:rank:step` acts on one rank at one step, the first time it
gets there; `name:rank:step:always` each time. `slow:rank:1.2` makes every step of a rank 1.2 times as long.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that changes a module after its import."""

    def __init__(self, name: str, change: Any) -> None:
        self._name, self._change, self._inner, self._finding = name, change, None, False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name or self._finding or self._inner is not None:
            return None
        self._finding = True
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self._inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._inner.exec_module(module)
        self._change(module)


if "ARGOSY_FAULT" in os.environ:
    import planted

    if (loop := sys.modules.get("argosy.train.loop")) is not None:  # in a fork of a process that has imported it
        planted.plant(loop)
    else:
        sys.meta_path.insert(0, _AfterImport("argosy.train.loop", planted.plant))

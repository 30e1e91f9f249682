"""Compiling Triton kernels for a GPU that need not be there: launches compile a kernel, in threads, and run nothing.

It is in `compat` because it replaces parts of Triton that are not public: its driver, `JITFunction.run` and `AsyncCompileMode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class _Described:
    """The driver of a GPU of which only the target is known."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(capability: tuple[int, int], threads: int) -> Iterator[None]:
    """Compile the kernels that are launched inside for an NVIDIA GPU of this compute capability, into Triton's cache, and run none.

    At the end all of them are compiled. A kernel that cannot be is passed over.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    run, active = JITFunction.run, driver._active
    major, minor = capability

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, grid=grid, warmup=True, **options)

    driver._active = _Described(GPUTarget("cuda", 10 * major + minor, 32))
    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run, driver._active = run, active

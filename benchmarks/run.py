"""The entry point of `make bench`: every measurement of docs/benchmarks.md that needs no GPU, one after another."""

from __future__ import annotations

import os
import platform

import order
import startup


def main() -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    for module in (startup, order):
        print(f"== {module.__name__}: {(module.__doc__ or '').splitlines()[0]}")
        module.main()
        print()


if __name__ == "__main__":
    main()

"""How long the command line takes to answer: `argosy --help` (bar: 0.3 s) and `argosy config show`, best and median of ten."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def measure(*arguments: str) -> list[float]:
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "argosy", *arguments], check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    for arguments in (["--help"], ["config", "show"], ["config", "models"]):
        seconds = measure(*arguments)
        print(f"argosy {' '.join(arguments):<15} best {min(seconds):.3f} s   median {statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()

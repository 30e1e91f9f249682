"""A benchmark of the dashboard on a run of a million logged steps: time to read the run, and response time after (bar: 200 ms)."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import orjson

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from record.run_dirs import record
from watch.conftest import TOKEN, Dashboard

COUNT = int(os.environ.get("STEPS", "1000000"))
METRICS = ("loss", "grad_norm", "tokens_per_s", "time/forward_backward")


def make(root: Path) -> Path:
    run = root / "million"
    run.mkdir(parents=True)
    with (run / "metrics.jsonl").open("wb") as file:
        for step in range(1, COUNT + 1):
            file.write(orjson.dumps(record(step)) + b"\n")
    return run / "metrics.jsonl"


def measure(http: httpx.Client, label: str, path: str, query: list[tuple[str, str]]) -> None:
    times = []
    for _ in range(20):
        started = time.perf_counter()
        http.get(path, params=query).raise_for_status()
        times.append(1000 * (time.perf_counter() - started))
    print(f"{label:<38} median {statistics.median(times):6.1f} ms   worst {max(times):6.1f} ms")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = make(Path(folder)).stat().st_size
        dashboard = Dashboard(Path(folder))
        http = httpx.Client(base_url=dashboard.address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        started = time.perf_counter()
        first = None
        slowest = 0.0
        while True:
            asked = time.perf_counter()
            known = http.get("/api/run", params={"run": "million"}).json()
            slowest = max(slowest, time.perf_counter() - asked)
            first = first or slowest
            if known["records"] == COUNT:
                break
        seconds = time.perf_counter() - started
        print(
            f"{COUNT:,} records, {size / 2**20:,.0f} MiB: read in {seconds:.1f} s; while reading, an answer took {1000 * slowest:.0f} ms at most"
        )
        named = [("run", "million")]
        measure(http, "the list of runs", "/api/runs", [])
        measure(http, "a run's page", "/api/run", named)
        for metric in METRICS:
            measure(
                http, f"curve of {metric}, all steps", "/api/curves", [*named, ("metric", metric), ("pieces", "600")]
            )
        zoomed = [
            *named,
            ("metric", "loss"),
            ("pieces", "600"),
            ("from", str(COUNT // 2)),
            ("to", str(COUNT // 2 + 1000)),
        ]
        measure(http, "curve of loss, zoomed to 1,000 steps", "/api/curves", zoomed)
        dashboard.close()


if __name__ == "__main__":
    main()

"""A benchmark of the guard on healthy runs and on injected faults: how many steps the default skips.

    python benchmarks/guard.py [--jobs N] [--steps 5000] [--fault-at 1400] [--device cpu|cuda] [--only NAME,…] [--out FILE] [KEY=VALUE …]

Healthy part: different small runs (`benchmarks/guard_cases.py`), each `argosy train` with the default guard, metrics of every step,
and a corpus the script makes. Bar: no step is skipped. The report also shows how close each run came: its largest gradient norm as a
multiple of the largest in the window before it, and of the largest in the run before it; its highest loss as a multiple of the
highest in the run before it; and the first of these for steps whose loss was above the guard's limit.

Fault part: the same code path with a fault injected into one or several steps of a run that has trained for a while. Bar: the guard
skips every step with a fault and no other; a persistent fault (a flipped bit of a weight) ends in a rewind to the last checkpoint.
Wrong labels raise the loss of a T5, not its gradient norm: there the bar is an alert.

Each run is a process with one thread, N of them in parallel. KEY=VALUE are run spec overrides for all runs, for example `guard=off`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from guard_cases import BASE, BEFORE, FAULTS, HEALTHY, make_corpora

WINDOW = 128
# Steps of a run after its first step with a fault.
AFTER_FAULT = 100


@dataclass
class Outcome:
    """The result of one run. `kind` is healthy or fault. The loss scaler, not the guard, skipped the `overflows` steps."""

    name: str
    kind: str
    steps: int = 0
    skipped: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    rewinds: int = 0
    wanted_rewinds: int = 0
    alerted: bool = False
    wanted_alert: bool = False
    overflows: int = 0
    norm_to_window: float = 0.0
    norm_to_run: float = 0.0
    loss_to_run: float = 0.0
    norm_where_loss_high: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        skipped = set(self.skipped) == set(self.expected) and self.rewinds == self.wanted_rewinds
        return not self.error and skipped and self.alerted >= self.wanted_alert


def run_case(kind: str, name: str, settings: dict[str, Any]) -> Outcome:
    """Train one case in this process."""
    outcome, started = Outcome(name, kind), time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        _train(outcome, settings)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _train(outcome: Outcome, settings: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    from argosy.config.resolve import resolve
    from argosy.train.run import TrainOptions, train

    case = FAULTS[outcome.name] if outcome.kind == "fault" else None
    keys = [*BASE, *(HEALTHY[outcome.name] if case is None else case.keys)]
    fault_at = settings["fault_at"]
    length = settings["steps"] if case is None else fault_at + AFTER_FAULT
    where, runs = Path(settings["corpora"]), Path(settings["runs"])
    keys = [key.replace("CORPORA", str(where)) for key in keys]
    keys += [f"name={outcome.name}", f"runs_dir={runs}", f"train.steps={length}", f"train.device={settings['device']}"]
    keys += [] if case is None else [f"checkpoint.every={fault_at - 10}"]
    if "init_from" in keys:
        keys = _start_from_another(keys, runs, outcome.name, settings["overrides"])
    resolved = resolve(None, [*keys, *settings["overrides"]])
    if case is not None:
        outcome.expected = [fault_at + n for n in range(case.lasts)] if case.skipped else []
        outcome.wanted_alert = not case.skipped
        outcome.wanted_rewinds = case.rewinds
        case.plant(fault_at, resolved.spec.model.vocab_size)
    train(resolved, None, TrainOptions(quiet=True))
    _read(outcome, runs / outcome.name)


def _start_from_another(keys: list[str], runs: Path, name: str, overrides: list[str]) -> list[str]:
    """Train another run first and return keys that start from its weights.

    The guard's extremes then never include the losses of an untrained model.
    """
    from argosy.config.resolve import resolve
    from argosy.train.run import TrainOptions, train

    keys = [key for key in keys if key != "init_from"]
    before = [*keys, *BEFORE, *overrides, f"name={name}-before", "train.steps=1000"]
    train(
        resolve(None, [key.replace("CORPORA", str(runs.parent / "corpora")) for key in before]),
        None,
        TrainOptions(quiet=True),
    )
    return [*keys, f"init_from={runs}/{name}-before"]


def _read(outcome: Outcome, run: Path) -> None:
    """Fill in the outcome from the run's metrics and events."""
    import numpy as np

    from argosy.record.jsonl import read_jsonl, read_metrics
    from argosy.train.guard import HIGH_LOSS

    records = list(read_metrics(run / "metrics.jsonl").values())
    events = list(read_jsonl(run / "events.jsonl"))
    outcome.steps = len(records)
    outcome.skipped = [event["step"] for event in events if event["event"] == "skip"]
    outcome.rewinds = sum(event["event"] == "rewind" for event in events)
    outcome.alerted = any(event.get("alert") == "spike" for event in events)
    losses = np.array([record["loss"] for record in records], float)
    norms = np.array([record["grad_norm"] for record in records], float)
    if records[-1].get("loss_scale") is not None:
        outcome.overflows = int(records[-1]["skipped"]) - len(set(outcome.skipped))
    losses, norms = losses[np.isfinite(norms)], norms[np.isfinite(norms)]
    outcome.first_loss, outcome.last_loss = float(losses[0]), float(losses[-100:].mean())
    if len(norms) > WINDOW:
        in_window = norms[WINDOW:] / np.lib.stride_tricks.sliding_window_view(norms, WINDOW)[:-1].max(1)
        of_run = losses[WINDOW:] / np.maximum.accumulate(losses)[WINDOW - 1 : -1]
        outcome.norm_to_window, outcome.loss_to_run = float(in_window.max()), float(of_run.max())
        outcome.norm_to_run = float((norms[WINDOW:] / np.maximum.accumulate(norms)[WINDOW - 1 : -1]).max())
        outcome.norm_where_loss_high = float(in_window[of_run > HIGH_LOSS].max(initial=0.0))


def _outcomes(cases: Sequence[tuple[str, str]], jobs: int, settings: dict[str, Any]) -> Iterator[Outcome]:
    """Yield the outcomes in the order the runs end. Each run is a new process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        futures = {pool.submit(run_case, kind, name, settings): (kind, name) for kind, name in cases}
        for future in as_completed(futures):
            kind, name = futures[future]
            problem = future.exception()
            yield future.result() if problem is None else Outcome(name, kind, error=_traceback(problem))


def _traceback(problem: BaseException) -> str:
    return "".join(traceback.format_exception(problem))


def _line(outcome: Outcome) -> str:
    facts = (
        f"loss {outcome.first_loss:.2f} -> {outcome.last_loss:.2f} | norm {outcome.norm_to_window:.3g} x window, "
        f"{outcome.norm_to_run:.3g} x run; loss {outcome.loss_to_run:.3g} x run, norm there {outcome.norm_where_loss_high:.3g} "
        f"x window | {outcome.seconds:.0f} s"
    )
    if outcome.error:
        facts = outcome.error.strip().splitlines()[-1]
    counts = f"{outcome.steps} steps, {len(outcome.skipped)} skipped"
    if outcome.kind == "fault":
        counts += f" of {len(outcome.expected)} to skip, {outcome.rewinds} rewinds" + ", an alert" * outcome.alerted
    if outcome.overflows:
        counts += f" (and {outcome.overflows} by the loss scaler)"
    return f"{'ok  ' if outcome.good else 'BAD '} {outcome.kind:7} {outcome.name:24} | {counts} | {facts}"


def _machine() -> dict[str, Any]:
    import torch

    about = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        about["processor"] = names[0].split(":", 1)[1].strip() if names else about["processor"]
    return about | {"torch": torch.__version__, "python": platform.python_version()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs in parallel")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each healthy run")
    parser.add_argument("--fault-at", type=int, default=1400, help="first step with a fault")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", default="", metavar="NAME,…", help="cases whose names contain one of these")
    parser.add_argument("--keep", type=Path, help="a directory in which corpora and runs are kept")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    cases = [("healthy", name) for name in HEALTHY] + [("fault", name) for name in FAULTS]
    cases = [(k, n) for k, n in cases if any(part in f"{k}:{n}" for part in arguments.only.split(","))]
    started, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        root = (arguments.keep or Path(folder)).absolute()
        make_corpora(root / "corpora")
        settings = {
            "corpora": str(root / "corpora"), "runs": str(root / "runs"), "steps": arguments.steps,
            "fault_at": arguments.fault_at, "device": arguments.device, "overrides": arguments.overrides,
        }  # fmt: skip
        for outcome in _outcomes(cases, arguments.jobs, settings):
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
            if outcome.error:
                print(outcome.error, file=sys.stderr, flush=True)
    outcomes.sort(key=lambda one: cases.index((one.kind, one.name)))
    return _report(outcomes, time.perf_counter() - started, arguments.out)


def _report(outcomes: list[Outcome], seconds: float, out: Path | None) -> int:
    healthy = [one for one in outcomes if one.kind == "healthy"]
    faults = [one for one in outcomes if one.kind == "fault"]
    steps, skipped = sum(one.steps for one in healthy), sum(len(one.skipped) for one in healthy)
    caught, bad = sum(one.good for one in faults), [one.name for one in outcomes if not one.good]
    if out is not None:
        summary = {
            "healthy_runs": len(healthy), "healthy_steps": steps, "skipped": skipped, "faults": len(faults),
            "faults_caught": caught, "bad": bad, "seconds": round(seconds, 1), "machine": _machine(),
        }  # fmt: skip
        out.write_text(json.dumps(summary | {"runs": [asdict(one) | {"good": one.good} for one in outcomes]}, indent=1))
    print()
    for one in outcomes:
        print(_line(one))
    print(f"\nhealthy: {skipped} of {steps:,} steps skipped in {len(healthy)} runs (bar: 0)")
    print(f"faults: {caught} of {len(faults)} caught, with no other step skipped")
    print(f"{seconds:.0f} s" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Facts about a run beside its curves: time by cause, predicted and measured values, and differences between the specs of two
runs."""

from __future__ import annotations

from typing import Any

from argosy.record.ledger import MEANING, PARTS, PRODUCTIVE
from argosy.watch.run_list import Run


def waterfall(last: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goodput waterfall: wall time, each cause that reduces it, and the productive rest."""
    spent = {part: float(last.get("spent", {}).get(part, 0.0)) for part in PARTS}
    total = sum(spent.values())
    rows: list[dict[str, Any]] = [
        {"part": "wall time", "seconds": total, "from": 0.0, "to": total, "meaning": "since the run was started"}
    ]
    at = total
    for part in PARTS:
        if part != PRODUCTIVE and spent[part] > 0:
            rows.append(
                {"part": part, "seconds": spent[part], "from": at - spent[part], "to": at, "meaning": MEANING[part]}
            )
            at -= spent[part]
    rows.append({"part": PRODUCTIVE, "seconds": at, "from": 0.0, "to": at, "meaning": MEANING[PRODUCTIVE]})
    return rows


def predicted(run: Run) -> list[dict[str, Any]]:
    """Return each predicted value of the planner beside the measured one."""
    plan, last = run.plan(), run.series.last
    memory = plan.get("memory_gib")
    stages = (
        [stage.get("allocated", 0.0) for stage in memory if isinstance(stage, dict)] if isinstance(memory, list) else []
    )
    pairs = [
        ("step time, s", plan.get("step_s"), last.get("step_s")),
        ("tokens/s per GPU", plan.get("tokens_per_s_gpu"), last.get("tokens_per_s_gpu")),
        ("MFU", plan.get("mfu"), last.get("mfu")),
        ("memory allocated, GiB", max(stages, default=None), last.get("memory_gib")),
    ]
    return [
        {
            "figure": name,
            "predicted": planned,
            "measured": measured,
            "ratio": measured / planned if measured and planned else None,
        }
        for name, planned, measured in pairs
        if isinstance(planned, int | float)
    ]


def config_rows(run: Run) -> list[dict[str, Any]]:
    origins = run.origins()
    return [{"key": key, "value": value, "origin": origins.get(key, "")} for key, value in run.flat_spec().items()]


def config_diff(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the keys in which the specs differ."""
    specs = [run.flat_spec() for run in runs]
    rows = [
        {"key": key, "values": [spec.get(key) for spec in specs]}
        for key in sorted(set().union(*specs))
        if key != "name"
    ]
    return [row for row in rows if len({repr(value) for value in row["values"]}) > 1]


# Beginnings of the origins of values that nobody wrote.
_UNWRITTEN = ("default", "derived", "preset ", "family ")


def comparison(runs: list[Run]) -> dict[str, Any]:
    """Return the table of hyper-parameters and results.

    Returns:
        `written`: differing keys that the spec or the command line of a run names; `derived`: the other differing keys;
        `runs`: each run's summary, with its values of these keys in `spec`.
    """
    with_spec = [run for run in runs if run.spec()]
    differing = {
        row["key"]: dict(zip((run.name for run in with_spec), row["values"], strict=True))
        for row in config_diff(with_spec)
    }
    written = [
        key
        for key in differing
        if any(not str(run.origins().get(key, "default")).startswith(_UNWRITTEN) for run in with_spec)
    ]
    rows = [
        run.summary() | {"spec": {key: values[run.name] for key, values in differing.items() if run.name in values}}
        for run in runs
    ]
    return {"written": written, "derived": [key for key in differing if key not in written], "runs": rows}

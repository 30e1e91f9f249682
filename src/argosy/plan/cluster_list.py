"""The GPUs and instance types that the planner knows, as `argosy config clusters` lists them."""

from __future__ import annotations

import json
from typing import Any

from argosy.config.show import columns
from argosy.plan.hardware import Facts, facts, usual_price


def clusters(as_json: bool) -> str:
    """Return a table of instance types and one of GPUs, or both as JSON. Prices are US dollars an hour, on demand."""
    known = facts()
    instances, gpus = _instances(known), _gpus(known)
    if as_json:
        return json.dumps({"instances": instances, "gpus": gpus}, indent=2)
    return "\n".join([
        *_table("instance type", instances), "",
        *_table("GPU", gpus), "",
        "a cluster is a number and one of these names: 2xp4d.24xlarge is two nodes, 16xH100 is sixteen GPUs in nodes of the usual size",
        "prices are estimates of on-demand prices; a GPU's is that of the cheapest instance which has it",
    ])  # fmt: skip


def _instances(known: Facts) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "gpus": f"{one.gpus} x {one.gpu}",
            "GiB": known.gpus[one.gpu].memory,
            "Gbit/s": one.network,
            "fabric": one.fabric,
            "$/hour": one.price,
        }
        for name, one in known.instances.items()
    }


def _gpus(known: Facts) -> dict[str, dict[str, Any]]:
    prices = {name: usual_price(gpu) for name, gpu in known.gpus.items()}
    return {
        name: {
            "GiB": gpu.memory,
            "TFLOP/s": gpu.peak(),
            "node": gpu.node,
            "$/hour": None if prices[name] is None else round((prices[name] or (0.0, ""))[0], 2),
        }
        for name, gpu in known.gpus.items()
    }


def _table(kind: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    head = [kind, *next(iter(rows.values()))]
    return columns([head, *([name, *map(_text, row.values())] for name, row in rows.items())])


def _text(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

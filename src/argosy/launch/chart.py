"""The JSON Schema of the Helm chart's values, made from the run spec's own: `python -m argosy.launch.chart`.

Helm checks values against it before anything is installed, so that a misspelt key is refused there as it is here.
"""

from __future__ import annotations

import json
from typing import Any

from argosy.config.json_schema import published_schema
from argosy.launch.placement import KUBERNETES

_TEXT = {"type": "string"}
_SWITCH = {"type": "boolean"}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def values_schema() -> dict[str, Any]:
    run = published_schema()
    definitions = run.pop("$defs")
    run.pop("$schema")
    run["required"] = sorted({*run["required"], "cluster"})
    definitions["ClusterSpec"]["properties"]["target"]["enum"] = list(KUBERNETES)  # what a pod can start
    viewer = {"enabled": _SWITCH, "port": _PORT}
    parts = {
        "run": run,
        "claim": _section({"create": _SWITCH, "storageClassName": _TEXT, "size": _TEXT}),
        "conductor": _section({"cpu": _TEXT, "memory": _TEXT, "mayMakeStorage": _SWITCH}),
        "dashboard": _section({**viewer, "token": _section({"secret": _TEXT, "key": _TEXT})}),
        "tensorboard": _section(viewer),
        "networkPolicy": _section({"enabled": _SWITCH}),
        "podMonitor": _section({"enabled": _SWITCH, "interval": _TEXT, "labels": _LABELS}),
        "global": {"type": "object"},  # Helm's own, which every chart gets
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Argosy chart",
        **_section(parts),
        "required": ["run"],
        "$defs": definitions,
    }


def _section(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


if __name__ == "__main__":
    print(json.dumps(values_schema(), indent=1))

"""Generated files of the Helm chart. `python -m argosy.launch.chart charts/argosy` writes them.

Before an install, Helm validates the values against a JSON Schema derived from the run spec's schema, so Helm rejects a misspelt
key as `argosy` does. The conductor's RBAC rules are the ones the targets declare.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

from argosy.config.cluster import ClusterSpec
from argosy.config.json_schema import published_schema
from argosy.launch.registry import find_target, pod_targets
from argosy.launch.target import Right
from argosy.launch.targets.kubernetes import EVERY_LAUNCH

_TEXT = {"type": "string"}
_SWITCH = {"type": "boolean"}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def values_schema() -> dict[str, Any]:
    run = published_schema()
    definitions = run.pop("$defs")
    run.pop("$schema")
    run["required"] = sorted({*run["required"], "cluster"})
    # The conductor runs in a pod and can start only these targets.
    definitions["ClusterSpec"]["properties"]["target"]["enum"] = pod_targets()
    viewer = {"enabled": _SWITCH, "port": _PORT, "cpu": _TEXT, "memory": _TEXT}
    parts = {
        "run": run,
        "claim": _section({"create": _SWITCH, "storageClassName": _TEXT, "size": _TEXT}),
        "conductor": _section({"cpu": _TEXT, "memory": _TEXT, "mayMakeStorage": _SWITCH}),
        "dashboard": _section({**viewer, "token": _section({"secret": _TEXT, "key": _TEXT})}),
        "tensorboard": _section(viewer),
        "networkPolicy": _section({"enabled": _SWITCH}),
        "podMonitor": _section({"enabled": _SWITCH, "interval": _TEXT, "labels": _LABELS}),
        # Helm passes its own `global` to every chart.
        "global": {"type": "object"},
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


def conductor_rights() -> dict[str, dict[str, Any]]:
    """Return the rules of the conductor's Role that depend on the target and its operator."""
    operators = get_args(ClusterSpec.model_fields["operator"].annotation)
    return {
        name: {operator: _rules(ClusterSpec(target=name, operator=operator)) for operator in operators}
        for name in pod_targets()
    }


def _rules(cluster: ClusterSpec) -> list[dict[str, list[str]]]:
    return [_rule(right) for right in find_target(cluster.target).rights(cluster)]


def _rule(right: Right) -> dict[str, list[str]]:
    return {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}


def files() -> dict[str, str]:
    """Return the contents of the generated files, by path inside the chart."""
    return {
        "values.schema.json": json.dumps(values_schema(), indent=1) + "\n",
        "files/every-launch.json": json.dumps([_rule(right) for right in EVERY_LAUNCH], indent=1) + "\n",
        "files/rights.json": json.dumps(conductor_rights(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for name, text in files().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

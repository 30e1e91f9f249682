"""The objects of the emulated API server: server-side apply, versions, and the history that watches read."""

from __future__ import annotations

import copy
import threading
import uuid
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]


def now() -> str:
    """Return the time as servers write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ConflictingFields(Exception):
    """Another manager owns fields that were applied with other values."""

    def __init__(self, manager: str, fields: list[str]) -> None:
        self.manager, self.fields = manager, fields
        super().__init__(f"{manager} owns {fields}")


class ObjectStore:
    """`objects[(plural, name)]` is what the cluster holds. Tests play the operators by `put`, and `history` has every change."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.changed = threading.Condition()
        # (version, type of the change, plural, the object after it)
        self.history: list[tuple[int, str, str, Object]] = []
        self.version = 1
        # What each manager applied last.
        self._applied: dict[Key, dict[str, Object]] = {}

    def put(self, plural: str, document: Object) -> None:
        """Store what an operator or the kubelet would write."""
        with self.changed:
            key = plural, document["metadata"]["name"]
            _born(document)
            self._change("MODIFIED" if key in self.objects else "ADDED", plural, document)
            self.objects[key] = document

    def remove(self, plural: str, name: str) -> Object | None:
        with self.changed:
            gone = self.objects.pop((plural, name), None)
            self._applied.pop((plural, name), None)
            if gone is not None:
                self._change("DELETED", plural, gone)
            return gone

    def _change(self, kind: str, plural: str, document: Object) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, plural, copy.deepcopy(document)))
        self.changed.notify_all()

    def apply(
        self, plural: str, document: Object, manager: str, *, force: bool, keep: bool = True
    ) -> tuple[bool, Object]:
        """Apply a document on the server's side.

        Fields that this manager applied before and does not name now are removed; fields of others stay.

        Args:
            keep: store the result. False for a dry run.

        Returns:
            Whether the object is new, and the object as it is now.

        Raises:
            ConflictingFields: another manager owns fields with other values, and `force` is off.
        """
        with self.changed:
            key = plural, document["metadata"]["name"]
            there, managers = self.objects.get(key), self._applied.get(key, {})
            for other, applied in managers.items():
                fields = [] if force or other == manager or there is None else sorted(_differing(applied, document))
                if fields:
                    raise ConflictingFields(other, fields)
            result = _born(_merged(there or {}, managers.get(manager, {}), document))
            if plural == "pods":
                result.setdefault("status", {"phase": "Pending"})
            if keep:
                self._applied[key] = managers | {manager: copy.deepcopy(document)}
                if result != there:
                    self.put(plural, result)
            return there is None, result

    def condition(self, plural: str, name: str, kind: str, **more: str) -> None:
        """Give a job the one condition that its operator would."""
        document = self.objects[plural, name]
        document.setdefault("status", {})["conditions"] = [{"type": kind, "status": "True", **more}]
        self.put(plural, document)

    def pod(self, name: str, *, run: str, stage: str, index: int = 0, **status: Any) -> None:
        """Make a pod of a stage, as an operator and the kubelet would."""
        labels = {"argosy/run": run, "argosy/stage": stage, "batch.kubernetes.io/job-completion-index": str(index)}
        container = {"name": "argosy", "resources": {"limits": {"memory": "8Gi"}}}
        volumes = [{"name": "storage", "persistentVolumeClaim": {"claimName": "fsx-shared-pvc"}}]
        spec = {"containers": [container], "volumes": volumes, "nodeName": f"node-{index}"}
        metadata = {"name": name, "labels": labels, "annotations": {"argosy/ranks": "8"}}
        self.put("pods", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})

    def event(self, about: str, reason: str, message: str) -> None:
        document = {"metadata": {"name": f"{about}.{self.version}"}, "type": "Warning", "reason": reason}
        self.put("events", document | {"message": message, "involvedObject": {"name": about}})


def _born(document: Object) -> Object:
    """Give an object what a server gives it when it is made."""
    document["metadata"].setdefault("uid", str(uuid.uuid4()))
    document["metadata"].setdefault("creationTimestamp", now())
    return document


def _merged(there: Object, before: Object, now: Object) -> Object:
    """Return an object after an apply. Lists are replaced as a whole."""
    kept = {
        key: value for key, value in there.items() if key in now or key not in before or isinstance(before[key], dict)
    }
    result = copy.deepcopy(kept)
    for key in kept.keys() - now.keys():
        if isinstance(before.get(key), dict) and isinstance(kept[key], dict):
            result[key] = _merged(kept[key], before[key], {})
            if not result[key]:
                del result[key]
    for key, value in now.items():
        inner = [part if isinstance(part, dict) else {} for part in (there.get(key), before.get(key))]
        result[key] = _merged(*inner, value) if isinstance(value, dict) else copy.deepcopy(value)
    return result


def _differing(applied: Object, now: Object, path: str = "") -> list[str]:
    """Return the paths of fields that both documents have, with different values."""
    found: list[str] = []
    for key in applied.keys() & now.keys():
        here, there = applied[key], now[key]
        if isinstance(here, dict) and isinstance(there, dict):
            found += _differing(here, there, f"{path}.{key}")
        elif here != there:
            found.append(f"{path}.{key}")
    return found

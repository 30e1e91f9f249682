"""What a namespace shows when a scenario failed: its jobs' pods and newest events. The namespace is deleted at the end, so this is all that stays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_EVENTS = 40


def describe(pods: Iterable[Any], events: Iterable[Any]) -> str:
    """Return a line for each pod with the state of its containers, and one for each of the newest events."""
    lines = [f"{pod.metadata.name}: {pod.status.phase} {_states(pod)}".rstrip() for pod in pods]
    newest = sorted(events, key=lambda event: str(event.last_timestamp or event.event_time or ""))[-_EVENTS:]
    lines += [f"{event.involved_object.name}: {event.reason}: {event.message}" for event in newest]
    return "\n".join(lines)


def cannot_start(pod: Any) -> str:
    """Return why a pod will not run without help, or an empty string: it has ended, or its image cannot be had."""
    if pod.status.phase in ("Failed", "Succeeded"):
        return f"it has ended: {_states(pod)}"
    waiting = [status.state.waiting for status in _statuses(pod) if status.state and status.state.waiting]
    stuck = [one for one in waiting if one.reason in ("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")]
    return f"{stuck[0].reason}: {stuck[0].message}" if stuck else ""


def _statuses(pod: Any) -> list[Any]:
    return [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]


def _states(pod: Any) -> str:
    told = []
    for status in _statuses(pod):
        waiting, ended = status.state and status.state.waiting, status.state and status.state.terminated
        if waiting:
            told.append(f"{status.name} waits: {waiting.reason} {waiting.message or ''}".strip())
        if ended:
            told.append(f"{status.name} ended with {ended.exit_code} {ended.reason or ''}".strip())
    unscheduled = [one.message for one in pod.status.conditions or [] if one.reason == "Unschedulable"]
    return "; ".join([*told, *unscheduled])

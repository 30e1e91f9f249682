"""The registry of targets by name. A target's module is imported when the target is requested.

Only modules in the table of `argosy.config.targets` are imported: a run spec chooses among them and cannot name another.
"""

from __future__ import annotations

from importlib import import_module

from argosy.config.cluster import ClusterSpec
from argosy.config.targets import TARGETS
from argosy.launch.target import Target


def find_target(name: str) -> Target:
    """Return the target registered under `name`, which the schema or the command line has checked."""
    target: Target = import_module(TARGETS[name]).TARGET
    return target


def all_targets() -> list[Target]:
    return [find_target(name) for name in TARGETS]


def local_target() -> Target:
    """Return the target that starts processes on this machine."""
    return next(target for target in all_targets() if target.on_this_machine)


def default_target() -> Target:
    """Return the target of a run spec whose `cluster` section names none."""
    return find_target(ClusterSpec.model_fields["target"].default)


def pod_targets() -> list[str]:
    """Return the names of the targets that start pods on Kubernetes."""
    return [target.name for target in all_targets() if target.makes_pods]

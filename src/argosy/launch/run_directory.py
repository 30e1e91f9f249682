"""The directory that the commands for a run read: the run's own, or a copy of it while the run is in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def in_cluster(run: str, namespace: str | None) -> bool:
    """Return whether a run is to be read from a cluster: a namespace is given, or its spec is launched as pods."""
    if namespace is not None or not _is_spec(run):
        return namespace is not None
    from argosy.launch.registry import find_target
    from argosy.launch.runs import find

    return find_target(find(run, None).target).makes_pods


@contextmanager
def run_directory(run: str, namespace: str | None, *, all_runs: bool = False) -> Iterator[Path]:
    """Give the directory of a run.

    Args:
        run: a run directory; the run's spec; or, with a namespace, its name.
        namespace: the Kubernetes namespace of a run that is named, or another one than its spec says.
        all_runs: give the directory of all runs that share the spec's `runs_dir`.
    """
    if in_cluster(run, namespace):
        from argosy.launch.cluster_record import copied_record

        with copied_record(run, namespace, all_runs=all_runs) as copy:
            yield copy
    elif _is_spec(run):
        from argosy.launch.runs import find

        directory = find(run, None).directory
        yield directory.parent if all_runs else directory
    else:
        yield Path(run)


def _is_spec(run: str) -> bool:
    return run.endswith((".yaml", ".yml")) and not Path(run).is_dir()

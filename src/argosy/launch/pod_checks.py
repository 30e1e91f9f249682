"""Refusals of runs that cannot run in pods: no image or volume, unknown sizes, a root user, paths that are lost with the pod."""

from __future__ import annotations

from pathlib import PurePosixPath

from argosy.config.cluster import ClusterSpec
from argosy.errors import ArgosyError
from argosy.launch.placement import Placement


def check_pods(placed: Placement) -> None:
    """Refuse a run that no Kubernetes target could start.

    Raises:
        ArgosyError: something a pod needs is missing, unknown or unsafe.
    """
    cluster = placed.cluster
    if cluster.image is None:
        raise ArgosyError(
            "config.missing-key",
            "a pod needs a container image",
            key="cluster.image",
            fix="build docker/Dockerfile, push it, and name it by digest: cluster.image=registry/argosy@sha256:…",
        )
    _check_image(cluster.image)
    if not placed.spec.name[-1].isalnum():
        raise ArgosyError(
            "config.bad-value",
            "the name of a run on Kubernetes is a label of its pods, and a label ends with a letter or a digit",
            key="name",
            value=placed.spec.name,
            fix=f"name={placed.spec.name.rstrip('._-')}",
        )
    if cluster.storage is None:
        raise ArgosyError(
            "config.missing-key",
            "pods are gone when they end, and with them the run: it needs a shared volume",
            key="cluster.storage",
            fix="cluster.storage=CLAIM for an existing claim; or {claim: …, kind: azure-lustre | azure-blob | fsx}",
        )
    _check_resources(placed)
    _check_security(cluster)
    _check_paths(placed)


def _check_resources(placed: Placement) -> None:
    """Refuse requests that are unknown or do not fit together."""
    cluster = placed.cluster
    if not placed.cpus or placed.memory_gib < 2:
        raise ArgosyError(
            "launch.resources",
            f"cores and memory of {cluster.instance or 'the nodes'} are not known, and a pod without requests is evicted first",
            key="cluster.memory" if placed.cpus else "cluster.cpus",
            fix="cluster.cpus=90 cluster.memory=1800Gi, or a little less than the nodes have",
        )
    if placed.shm_gib >= placed.memory_gib:
        raise ArgosyError(
            "launch.resources",
            f"/dev/shm of {placed.shm_gib} GiB counts as memory, and the pod has {placed.memory_gib} GiB of it",
            key="cluster.shm",
            value=cluster.shm,
            fix=f"cluster.shm={max(1, placed.memory_gib // 8)}Gi",
        )


def _check_security(cluster: ClusterSpec) -> None:
    """Refuse root without `cluster.privileged`, and a variable with both a secret and a plain value."""
    if cluster.user == 0 and not cluster.privileged:
        raise ArgosyError(
            "launch.security",
            "pods run as an ordinary user",
            key="cluster.user",
            value=0,
            fix="cluster.user=1000, or cluster.privileged=true if root is meant",
        )
    for name in sorted(cluster.env.keys() & cluster.secrets.keys()):
        raise ArgosyError(
            "config.conflict",
            f"{name} comes from a Secret ({cluster.secrets[name]}) and stands in cluster.env too",
            key=f"cluster.env.{name}",
            fix="leave it out of one of them",
        )


def _check_image(image: str) -> None:
    """Refuse a mutable image name, with which pods of one run could get different images."""
    name, _, digest = image.partition("@")
    _, _, tag = name.rpartition("/")[2].partition(":")
    if not digest and tag in ("", "latest"):
        raise ArgosyError(
            "launch.image",
            f"{image} is another image whenever somebody pushes one"
            + ("" if tag else ": without a tag it means :latest"),
            key="cluster.image",
            value=image,
            fix="name it by the digest that docker push prints: registry/argosy@sha256:…; a tag of your own will do",
        )


def _check_paths(placed: Placement) -> None:
    """Refuse absolute paths outside the shared volume for what must outlive a pod. Relative paths start at its mount."""
    mount, spec = PurePosixPath(placed.storage.mount), placed.spec
    paths = {"runs_dir": spec.runs_dir} | {
        f"{key}.path": source.path.removeprefix("file://") for key, source in spec.data.sources.items()
    }
    for key, path in paths.items():
        if path.startswith("/") and mount not in (PurePosixPath(path), *PurePosixPath(path).parents):
            raise ArgosyError(
                "launch.not-shared",
                f"{path} is inside the pod and gone when it ends: the shared volume is mounted at {mount}",
                key=key,
                value=path,
                origin=placed.resolved.origins.get(key),
                fix=f"a path under {mount}, or a relative one, which starts there",
            )

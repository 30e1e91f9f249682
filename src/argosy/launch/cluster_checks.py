"""Checks of a Kubernetes cluster before the first stage: operators and their versions, rights, the claim and the queue.

The objects of every stage that is going to start are applied as a dry run. The server then checks that it knows each kind and each field, and
that the user may create them, so that an old operator is found before hours of data preparation and not after.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from argosy.errors import ArgosyError
from argosy.launch.api import DENIED, UNKNOWN_FIELD, Cluster, Forbidden, install_hint
from argosy.launch.manifests import CLAIM, JOB, KUBERNETES_LEAST, LOCAL_QUEUES, Kind, Manifests, kind_of
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest
from argosy.launch.stages import Stage
from argosy.launch.target import Right


def check_cluster(
    cluster: Cluster, placed: Placement, manifests: Manifests, starting: Iterable[Stage], kinds: Sequence[Kind]
) -> None:
    """Refuse a launch that the cluster would refuse at a later stage.

    Args:
        starting: the stages that are going to start.
        kinds: the kinds that the target declares, with the operators that provide them.

    Raises:
        ArgosyError: an operator, a right, the claim or the queue is missing, or an operator is too old.
    """
    for document in [*manifests.storage, *manifests.spec]:
        _try_out(cluster, document, kinds)
    _check_claim(cluster, placed)
    _check_queue(cluster, placed)
    for stage in starting:
        *before, job = manifests.stages[stage]
        for document in before:
            _try_out(cluster, document, kinds)
        # A job that exists is followed or replaced. Most of its fields cannot be changed, in a dry run either.
        if cluster.get(kind_of(job), job["metadata"]["name"]) is None:
            _try_out(cluster, job, kinds, refers=bool(before))


def check_rights(cluster: Cluster, rights: Iterable[Right]) -> None:
    """Refuse a launch whose user lacks a right that the launch needs, and say which, with the commands that grant them.

    Raises:
        ArgosyError: a right is missing.
    """
    missing = {
        right: [verb for verb in right.verbs if not cluster.may(right.group, right.resource, verb)] for right in rights
    }
    missing = {right: verbs for right, verbs in missing.items() if verbs}
    if not missing:
        return
    named = {right: f"{right.resource}.{right.group}" if right.group else right.resource for right in missing}
    said = "; ".join(f"{', '.join(verbs)} {named[right]}" for right, verbs in missing.items())
    space = cluster.namespace
    grants = [
        f"kubectl create role argosy-{right.resource.replace('/', '-')} -n {space} --verb={','.join(right.verbs)} --resource={named[right]}"
        for right in missing
    ]
    raise ArgosyError(
        "launch.refused",
        f"in the namespace {space} you lack the right to {said}",
        key="cluster.namespace",
        value=space,
        fix="\n".join(
            [
                "an administrator of the namespace grants it, with a role binding for each role:",
                *grants,
                f"kubectl create rolebinding ROLE -n {space} --role=ROLE --user=USER",
            ]
        ),
    )


def _try_out(cluster: Cluster, document: Manifest, kinds: Sequence[Kind], *, refers: bool = False) -> None:
    """Apply a document as a dry run.

    Args:
        refers: the document names objects that do not exist yet. An admission webhook that looks for them cannot judge it.
    """
    try:
        cluster.apply(document, dry_run=True)
    except ArgosyError as error:
        field = re.search(r'unknown field "([^"]+)"|(\.\S+): ' + UNKNOWN_FIELD, error.cause)
        kind = next((kind for kind in kinds if kind == kind_of(document)), kind_of(document))
        if field is not None:
            raise _too_old(kind, (field[1] or field[2]).lstrip("."), error) from None
        if not (refers and DENIED in error.cause):
            raise


def _too_old(kind: Kind, field: str, error: ArgosyError) -> ArgosyError:
    if kind == JOB:
        return ArgosyError(
            "launch.refused",
            f"the Kubernetes of this cluster is too old: its Job has no field {field}; {KUBERNETES_LEAST} or newer is needed",
            fix="upgrade the cluster; `kubectl version` shows what it is",
        )
    if kind.operator is None:
        return error
    return ArgosyError(
        "launch.refused",
        f"the {kind.operator.name} of this cluster is too old: its {kind.name} has no field {field}, which came with {kind.operator.least}",
        key="cluster.target",
        fix=f"{install_hint(kind)}, or choose another target: --target indexed-job needs no operator",
    )


def _check_claim(cluster: Cluster, placed: Placement) -> None:
    """Refuse a claim that is said to exist and does not. Pods would wait for it without end."""
    store = placed.storage
    if store.kind != "existing":
        return
    try:
        found = cluster.get(CLAIM, store.claim)
    except Forbidden:
        # Not being allowed to look says nothing about the claim.
        return
    if found is None:
        raise ArgosyError(
            "launch.storage",
            f"the namespace {cluster.namespace} has no claim {store.claim}",
            key="cluster.storage.claim",
            value=store.claim,
            fix=f"kubectl get pvc -n {cluster.namespace} lists them; or let the launch make one: cluster.storage.kind=azure-lustre, azure-blob, fsx or class",
        )


def _check_queue(cluster: Cluster, placed: Placement) -> None:
    """Refuse a queue that does not exist. Kueue would leave the job suspended without end."""
    queue = placed.cluster.queue
    if queue is None:
        return
    try:
        known = [kind for kind in LOCAL_QUEUES if cluster.knows(kind)]
        if known and any(cluster.get(kind, queue) is not None for kind in known):
            return
    except Forbidden:
        return
    cause = (
        f"the namespace {cluster.namespace} has no LocalQueue {queue}" if known else "this cluster does not have Kueue"
    )
    install = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/kueue/releases/download/v0.13.0/manifests.yaml"
    raise ArgosyError(
        "launch.refused",
        cause,
        key="cluster.queue",
        value=queue,
        fix=f"kubectl get localqueues -n {cluster.namespace} lists them; or leave cluster.queue out"
        if known
        else install,
    )

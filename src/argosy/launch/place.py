"""The placement of a run on its cluster. Every refusal happens before a file is written.

Sizes come from the instance's facts unless the spec overrides them. If the spec leaves the layout open, the planner chooses one for
the available GPUs. The same run can therefore resume on another number of nodes, with another layout but the same batch size and
sample order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from argosy.config.cluster import ClusterSpec
from argosy.config.layout import check_world, describe_layout
from argosy.config.resolve import Resolved, resolve
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.launch.fabric import check_sharp, choose_fabric, nic_request
from argosy.launch.placement import Placement, gib
from argosy.launch.registry import find_target
from argosy.launch.secret_checks import refuse_secrets, require_tokens
from argosy.launch.target import Target
from argosy.plan.advise import predict
from argosy.plan.auto import open_layout, settle_micro_batch
from argosy.plan.hardware import Cluster, Instance, find_instance, parse_cluster

# The share of a node's cores and memory that a pod requests. The rest is left to the system.
_SHARE = 0.9
_MOST_SHM_GIB = 64


def place(
    path: Path, overrides: Sequence[str] = (), target: str | None = None, *, oversized: bool = False
) -> Placement:
    """Read a run spec and place the run on its cluster.

    Args:
        overrides: `key=value` pairs that override the spec.
        target: the target to use instead of `cluster.target`.
        oversized: accept a layout that, by the planner's estimate, does not fit into GPU memory.

    Raises:
        ArgosyError: the run cannot be started there as it is specified.
    """
    added = [] if target is None else [f"cluster.target={target}"]
    resolved = resolve(path, [*overrides, *added], elsewhere=True)
    cluster = _cluster_of(resolved)
    chosen_target = find_target(cluster.target)
    _check_nodes(resolved, cluster, chosen_target)
    instance = None if cluster.instance is None else find_instance(cluster.instance)
    gpus = _gpus(cluster, instance, chosen_target)
    ranks = cluster.ranks or gpus or 1
    source = path.read_text(encoding="utf-8")
    _check_curations(resolved)
    refuse_secrets(source, overrides, resolved.spec, stays_here=chosen_target.on_this_machine)
    if chosen_target.makes_pods:
        require_tokens(resolved.spec)
    planned_on = _planned_on(resolved, instance, cluster, gpus)
    layout = open_layout(resolved, planned_on, ranks * cluster.nodes)
    if layout:
        resolved = resolve(path, [*overrides, *added, *layout], elsewhere=True)
    # The ranks choose the same micro-batch, if it is open.
    resolved = settle_micro_batch(resolved, planned_on, None)
    _check_ranks(resolved, cluster, ranks, chosen_target)
    fabric = "none" if chosen_target.on_this_machine else choose_fabric(cluster, instance)
    check_sharp(cluster, fabric)
    memory = _memory(cluster, instance, gpus)
    placed = Placement(
        resolved=resolved,
        source=source,
        overrides=(*overrides, *layout),
        cluster=cluster,
        instance=instance,
        fabric=fabric,
        nics=nic_request(cluster, instance, gpus, fabric) if chosen_target.makes_pods else None,
        gpus=gpus,
        ranks=ranks,
        cpus=cluster.cpus or int((instance.cpus or 0) * _share(instance, gpus) if instance is not None else 0),
        memory_gib=memory,
        shm_gib=gib(cluster.shm) if cluster.shm else max(1, min(_MOST_SHM_GIB, memory // 8)),
        in_pods=chosen_target.makes_pods,
        prediction=None if planned_on is None else predict(resolved.spec, planned_on),
    )
    chosen_target.check(placed)
    if not oversized:
        _check_memory(placed)
    return placed


def _check_ranks(resolved: Resolved, cluster: ClusterSpec, ranks: int, target: Target) -> None:
    check_world(
        resolved.spec.parallel,
        ranks * cluster.nodes,
        f"{cluster.nodes} nodes of {ranks} ranks",
        resolved.spec.train.global_batch,
        per_node=None if target.on_this_machine else ranks,
    )


def _cluster_of(resolved: Resolved) -> ClusterSpec:
    if resolved.spec.cluster is None:
        raise ArgosyError(
            "config.missing-key",
            "the run spec does not say where to launch",
            key="cluster",
            fix="add cluster: {target: jobset, instance: p4d.24xlarge, nodes: 2, storage: CLAIM, image: …}, or pass --target local",
        )
    return resolved.spec.cluster


def _check_curations(resolved: Resolved) -> None:
    """Refuse wrong steps of a curation. They are loaded only if a corpus has some, because rendering needs no numpy otherwise."""
    if any(source.prepare is not None and source.prepare.curate for source in resolved.spec.data.sources.values()):
        from argosy.data.curate.curate_recipe import check_curations

        check_curations(resolved.spec)


def _check_nodes(resolved: Resolved, cluster: ClusterSpec, target: Target) -> None:
    if target.on_this_machine and cluster.nodes > 1:
        raise ArgosyError(
            "config.conflict",
            f"this machine is one node, and the run is meant for {cluster.nodes}",
            key="cluster.nodes",
            value=cluster.nodes,
            origin=resolved.origins.get("cluster.nodes"),
            fix="cluster.nodes=1, with a layout for the ranks of one node (`parallel: auto` finds one)",
        )


def _check_memory(placed: Placement) -> None:
    """Refuse a layout that would run out of GPU memory, before the run occupies any node."""
    prediction = placed.prediction
    if prediction is None or prediction["fits"]:
        return
    stage, need = max(enumerate(prediction["memory_gib"]), key=lambda one: float(one[1]["device"]))
    parts = " + ".join(
        f"{name} {value:,.1f}" for name, value in need.items() if name not in ("allocated", "device") and value >= 0.05
    )
    layout, cluster = placed.spec.parallel, placed.cluster
    raise ArgosyError(
        "plan.does-not-fit",
        f"a rank of {'stage ' + str(stage) + ' of ' if layout.pp > 1 else ''}this layout ({describe_layout(layout)}) needs "
        f"{need['device']:,.1f} GiB, and a GPU of {cluster.instance} has {prediction['card_gib']:g}: {parts}",
        key="parallel",
        value=describe_layout(layout),
        origin=placed.resolved.origins.get("parallel.dp_shard"),
        fix="leave `parallel` out, and the planner finds a layout that fits, or says how many GPUs it takes; a smaller "
        "parallel.micro_batch, parallel.recompute=full, more cluster.nodes; --oversized launches it all the same",
    )


def _gpus(cluster: ClusterSpec, instance: Instance | None, target: Target) -> int:
    if cluster.gpus is not None:
        if instance is not None and cluster.gpus > instance.gpus:
            raise ArgosyError(
                "launch.resources",
                f"a {instance.name} has {instance.gpus} GPUs, and {cluster.gpus} are asked for",
                key="cluster.gpus",
                value=cluster.gpus,
                fix=f"cluster.gpus={instance.gpus}, or leave it out",
            )
        return cluster.gpus
    if instance is not None:
        return instance.gpus
    if target.on_this_machine:
        return 0
    raise ArgosyError(
        "config.missing-key",
        "nothing says how many GPUs a node has",
        key="cluster.instance",
        fix="cluster.instance=p4d.24xlarge (`argosy plan` knows the names), or cluster.gpus=8, or 0 to train on CPUs",
    )


def _memory(cluster: ClusterSpec, instance: Instance | None, gpus: int) -> int:
    if cluster.memory is not None:
        return gib(cluster.memory)
    return int((instance.ram or 0) * _share(instance, gpus)) if instance is not None else 0


def _share(instance: Instance, gpus: int) -> float:
    """Return the share of a node's cores and memory to request. Half of its GPUs get half, so that other jobs can use the rest."""
    return _SHARE * (gpus / instance.gpus if 0 < gpus < instance.gpus else 1)


def _planned_on(resolved: Resolved, instance: Instance | None, cluster: ClusterSpec, gpus: int) -> Cluster | None:
    """Return the GPUs that the run uses, or None if the planner does not know the nodes or the model."""
    if (
        instance is None
        or not gpus
        or (cluster.ranks or gpus) != gpus
        or not architecture_of(resolved.spec.model).planned
    ):
        return None
    return parse_cluster(f"{cluster.nodes}x{instance.name}").using(gpus)

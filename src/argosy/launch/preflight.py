"""Preflight: every check of every node before training, the judgement of the bandwidth between nodes, and the report.

Nothing here needs torch. The ranks measure the bandwidth (`argosy.measure.bandwidth`), and this module judges the result.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.config.resolve import resolve
from argosy.console.output import say
from argosy.errors import EXIT_DONE, EXIT_REFUSED
from argosy.launch.fabric import choose_fabric
from argosy.launch.node_checks import NODE_CHECKS, Check, Wanted
from argosy.launch.storage_checks import STORAGE_CHECKS
from argosy.plan.hardware import find_instance

_log = logging.getLogger(__name__)


def check_node(wanted: Wanted) -> list[Check]:
    """Run every check on this node. A check that raises counts as failed: an exception would end the report of all nodes."""
    found = []
    for check in (*NODE_CHECKS, *STORAGE_CHECKS):
        try:
            found.append(check(wanted))
        except Exception as error:  # noqa: BLE001 - an ailing node fails in ways that nobody has listed
            said = str(error) or type(error).__name__
            found.append(Check(check.__name__.removeprefix("check_"), False, said, "see what the system says"))
    return found


def judge_bandwidth(
    wanted: Wanted,
    measured: Sequence[tuple[str, float]],
    transport: str | None,
    *,
    collnet: bool = False,
    topology: str | None = None,
) -> list[Check]:
    """Return the checks of transport and bandwidth between nodes.

    Args:
        measured: (nodes, bus bandwidth in GB/s) for all nodes together and for pairs of nodes.
        transport: the network NCCL uses, if its log says so.
        collnet: NCCL reduces inside the network.
        topology: the topology file that NCCL read, if its log says so.
    """
    checks = []
    if wanted.sharp:
        fix = (
            "" if collnet else "leave cluster.sharp out, or use an image and driver whose SHARP versions fit each other"
        )
        checks.append(Check("sharp", collnet, "in use" if collnet else "asked for, and NCCL does not use it", fix))
    # Without a transport there was no NCCL log to read.
    if wanted.topology is not None and transport is not None:
        used = topology == wanted.topology
        found = f"NCCL read {topology}" if used else f"NCCL did not read {wanted.topology}"
        fix = (
            ""
            if used
            else "NCCL_TOPO_FILE has to name a file of the pod: see cluster.env, and the image's own variables"
        )
        checks.append(Check("topology", used, found, fix))
    # SHARP's plugin brings a transport of its own name.
    if transport is not None and not wanted.sharp:
        expected = {"efa": "libfabric", "infiniband": "ib", "roce": "ib", "tcp": "socket"}.get(wanted.fabric)
        ok = expected is None or transport.lower().startswith(expected)
        fix = f"NCCL talks by {transport}, and the nodes have {wanted.fabric}: the plugin or the devices are not in the pod"
        checks.append(Check("transport", ok, f"NCCL uses {transport}", "" if ok else fix))
    slow: dict[str, int] = {}
    for nodes, rate in measured:
        enough = None if wanted.floor is None else rate >= wanted.floor
        floor = "" if wanted.floor is None else f", at least {wanted.floor:g} expected"
        checks.append(Check("all-reduce", enough, f"{nodes}: {rate:.2f} GB/s{floor}"))
        if enough is False:
            for node in nodes.split(" + "):
                slow[node] = slow.get(node, 0) + 1
    if slow:
        worst = [node for node, count in slow.items() if count == max(slow.values())]
        suspect = worst[0] if len(worst) == 1 else " or ".join(worst)
        checks.append(Check("suspect", False, f"{suspect} is in every slow measurement", "cordon it, and launch again"))
    return checks


def wanted_of(arguments: Sequence[str], environ: Mapping[str, str]) -> Wanted:
    """Return what `[RUN.yaml] [key=value …]` requires of a node. Without arguments there are no requirements."""
    if not arguments:
        return Wanted()
    spec = resolve(Path(arguments[0]), arguments[1:], elsewhere=True).spec
    cluster = spec.cluster
    if cluster is None:
        return Wanted.of(spec, None, "none", environ)
    instance = None if cluster.instance is None else find_instance(cluster.instance)
    fabric = choose_fabric(cluster, instance)
    return Wanted.of(spec, instance, fabric, environ)


def finish(
    wanted: Wanted,
    own: Sequence[Check],
    probed: Mapping[str, Any] | None,
    *,
    as_json: bool,
    rank: int = 0,
    local_rank: int = 0,
) -> int:
    """Print the results and return the exit code, which is the same on every rank.

    Rank 0 prints all of them. The first rank of every other node prints the failed checks of all nodes, because the node that ends first
    ends the others on Kubernetes, and their logs go with them.
    """
    reports: dict[str, Sequence[Check]] = {socket.gethostname(): own}
    if probed is not None:
        reports = {node: [Check(**check) for check in checks] for node, checks in probed["nodes"].items()}
        reports["all nodes"] = judge_bandwidth(
            wanted, probed["measured"], probed["transport"], collnet=probed["collnet"], topology=probed["topology"]
        )
    well = all(check.ok is not False for checks in reports.values() for check in checks)
    if rank == 0 and as_json:
        say(json.dumps({"ok": well, "nodes": {n: [check.as_dict() for check in c] for n, c in reports.items()}}))
    elif rank == 0:
        describe(reports, say)
    elif local_rank == 0:
        describe_failed(reports, _log.error)
    return EXIT_DONE if well else EXIT_REFUSED


def describe(reports: Mapping[str, Sequence[Check]], say: Callable[[str], None]) -> None:
    """Print a line for each check, then each failed check with its node and its fix."""
    words = {True: "ok", False: "FAILED", None: "-"}
    for node, checks in reports.items():
        for check in checks:
            say(f"{node:<20} {check.name:<11} {words[check.ok]:<7} {check.found}")
    describe_failed(reports, say)


def describe_failed(reports: Mapping[str, Sequence[Check]], say: Callable[[str], None]) -> None:
    """Print each failed check with its node and its fix."""
    bad = {node: [check for check in checks if check.ok is False] for node, checks in reports.items()}
    for node, checks in bad.items():
        for check in checks:
            say(f"{node}: {check.name}: {check.found}" + (f"\n  fix: {check.fix}" if check.fix else ""))

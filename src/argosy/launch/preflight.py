"""Preflight checks of one node before training: GPUs, limits, devices, storage, names, clock, secrets.

Each check reports what it found, and a fix if that is not enough. Nothing here needs torch. The ranks measure the bandwidth between
nodes (`argosy.measure.bandwidth`), and this module judges the result.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from argosy.config.counts import checkpoint_bytes
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.console.output import say
from argosy.errors import EXIT_DONE, EXIT_REFUSED
from argosy.launch.fabric import card_count, choose_fabric
from argosy.launch.placement import gib
from argosy.launch.registry import find_target
from argosy.plan.hardware import Instance, find_instance

_MIB, _GIB = 2**20, 2**30
_PROBE_BYTES = 128 * _MIB
# The memory RDMA must be able to pin. With less, the first connection fails with a message about memory.
_MEMLOCK = 16 * _GIB
_LEAST_SHM = 1 * _GIB
_CLOCK_S = 5.0
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Check:
    name: str
    # None: there was nothing to check.
    ok: bool | None
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Wanted:
    """The requirements of a run spec on a node. Without a run spec, the checks only report what they find."""

    gpus: int | None = None
    fabric: str = "none"
    nics: int = 0
    shm_bytes: int = _LEAST_SHM
    storage: Path = Path(".")
    needed_bytes: int = 0
    names: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    # The least bus bandwidth between nodes, in GB/s.
    floor: float | None = None
    # Reductions run inside the network (InfiniBand SHARP).
    sharp: bool = False

    @classmethod
    def of(cls, spec: RunSpec, instance: Instance | None, fabric: str, environ: Mapping[str, str]) -> Wanted:
        cluster = spec.cluster
        saved = checkpoint_bytes(spec.model, spec.optim.rule) * (spec.checkpoint.keep + 1)
        if cluster is None:
            return cls(storage=Path(spec.runs_dir), needed_bytes=saved)
        gpus = cluster.gpus if cluster.gpus is not None else (instance.gpus if instance is not None else None)
        known = 0 if instance is None else card_count(instance, gpus or instance.gpus)
        cards = cluster.nics if cluster.nics is not None else known
        master = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR")
        return cls(
            gpus=gpus,
            fabric=fabric,
            nics=cards if fabric not in ("none", "tcp") else 0,
            shm_bytes=gib(cluster.shm) * _GIB if cluster.shm and find_target(cluster.target).makes_pods else _LEAST_SHM,
            storage=Path(spec.runs_dir),
            needed_bytes=saved,
            names=() if master is None else (master,),
            tokens=tuple(cluster.secrets),
            floor=cluster.allreduce_floor or (instance.allreduce_floor if instance is not None else None),
            sharp=cluster.sharp,
        )


def check_node(wanted: Wanted) -> list[Check]:
    """Run every check on this node. A check that raises OSError counts as failed."""
    found = []
    for check in (_gpus, _memlock, _shm, _devices, _space, _speed, _clock, _names, _tokens):
        try:
            found.append(check(wanted))
        except OSError as error:
            found.append(Check(check.__name__.strip("_"), False, str(error), "see what the system says"))
    return found


def _gpus(wanted: Wanted) -> Check:
    columns = "name,driver_version,ecc.errors.uncorrected.volatile.total"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        ok = None if not wanted.gpus else False
        return Check(
            "gpus",
            ok,
            "no nvidia-smi here",
            "" if ok is None else "a node with a driver, and nvidia.com/gpu in the pod",
        )
    done = subprocess.run(
        [tool, f"--query-gpu={columns}", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows:
        return Check(
            "gpus", False, (done.stderr or done.stdout).strip()[:300], "the driver does not answer: replace the node"
        )
    faulty = [str(number) for number, row in enumerate(rows) if row[-1].isdigit() and int(row[-1]) > 0]
    if faulty:
        return Check(
            "gpus", False, f"GPU {', '.join(faulty)} has uncorrected memory errors", "reset or replace the node"
        )
    ailing = _ailing(tool)
    if ailing:
        return Check("gpus", False, ailing, "reset or replace the node: the driver says that it has to be")
    text = f"{len(rows)} x {rows[0][0]}, driver {rows[0][1]}"
    if wanted.gpus and len(rows) != wanted.gpus:
        return Check(
            "gpus",
            False,
            f"{text}; {wanted.gpus} were asked for",
            "a GPU has fallen off the bus, or the pod asks for fewer",
        )
    return Check("gpus", True, text)


def _ailing(tool: str) -> str:
    """Return why the driver considers a GPU faulty, or an empty string.

    A recent driver names the recovery action it needs after an error (an Xid). Every driver reports memory rows that it could not remap.
    """
    done = subprocess.run([tool, "-q"], capture_output=True, text=True, check=False, timeout=60)
    pairs = [[part.strip() for part in line.split(" : ", 1)] for line in done.stdout.splitlines() if " : " in line]
    asked = [value for key, value in pairs if key == "GPU Recovery Action" and value not in ("None", "N/A")]
    failed = [value for key, value in pairs if key == "Remapping Failure Occurred" and value == "Yes"]
    if asked:
        return f"the driver asks for: {', '.join(sorted(set(asked)))} ({len(asked)} of the GPUs)"
    return f"{len(failed)} of the GPUs have memory rows that could not be remapped" if failed else ""


def _memlock(wanted: Wanted) -> Check:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _GIB:.2f} GiB"
    if wanted.fabric in ("none", "tcp"):
        return Check("memlock", None, text)
    enough = soft == resource.RLIM_INFINITY or soft >= _MEMLOCK or _may_lock()
    fix = (
        "raise the node's container runtime limit (LimitMEMLOCK=infinity): a capability does not help an ordinary user"
    )
    return Check("memlock", enough, text, "" if enough else fix)


def _may_lock() -> bool:
    """Return whether the process has CAP_IPC_LOCK, which lifts the memlock limit."""
    status = Path("/proc/self/status").read_text()
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 14 & 1)


def _shm(wanted: Wanted) -> Check:
    usage = os.statvfs("/dev/shm")
    size = usage.f_blocks * usage.f_frsize
    ok = size >= wanted.shm_bytes
    return Check(
        "shm", ok, f"{size / _GIB:.1f} GiB", "" if ok else "cluster.shm=…: NCCL and data loading share memory there"
    )


def _devices(wanted: Wanted) -> Check:
    """Check that the network cards are present and up. The bandwidth measurement shows whether NCCL uses them."""
    cards = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if wanted.fabric in ("none", "tcp"):
        return Check("fabric", None, f"{wanted.fabric}; {len(cards)} RDMA devices")
    down = [card for card in cards if "ACTIVE" not in _port_state(card)]
    if len(cards) < wanted.nics or down:
        what = f"{len(cards)} of {wanted.nics} devices" + (f", not active: {', '.join(down)}" if down else "")
        return Check(
            "fabric", False, what, "check the device plugin and the pod's resource; a port that is down means the node"
        )
    if wanted.fabric == "efa" and (cause := _no_provider()):
        fix = "the image of docker/Dockerfile.efa, and vpc.amazonaws.com/efa in the pod; never a hostPath of /dev/infiniband"
        return Check("fabric", False, cause, fix)
    return Check("fabric", True, f"{len(cards)} devices, all active")


def _no_provider() -> str:
    """Return why libfabric cannot use EFA here, or an empty string if it can."""
    tool = shutil.which("fi_info", path=f"{os.environ.get('PATH', '')}{os.pathsep}/opt/amazon/efa/bin")
    if tool is None:
        return "libfabric's fi_info is not in this image"
    done = subprocess.run([tool, "-p", "efa"], capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else f"fi_info -p efa: {(done.stderr or done.stdout).strip()[:200]}"


def _port_state(card: str) -> str:
    states = [path.read_text() for path in (_INFINIBAND / card / "ports").glob("*/state")]
    # EFA devices have no port state to read.
    return " ".join(states) or "ACTIVE"


def _space(wanted: Wanted) -> Check:
    nearest = next(p for p in (wanted.storage.absolute(), *wanted.storage.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    ok = free >= wanted.needed_bytes
    text = f"{free / _GIB:,.0f} GiB free in {nearest}"
    fix = f"checkpoints need {wanted.needed_bytes / _GIB:,.0f} GiB: more storage, or a smaller checkpoint.keep"
    return Check("space", ok, text, "" if ok else fix)


def _speed(wanted: Wanted) -> Check:
    """Measure a write and a read back from storage, bypassing the page cache as far as possible."""
    wanted.storage.mkdir(parents=True, exist_ok=True)
    probe = wanted.storage / f".preflight-{socket.gethostname()}-{os.getpid()}"
    block = os.urandom(8 * _MIB)
    try:
        start = time.perf_counter()
        with probe.open("wb", buffering=0) as file:
            for _ in range(_PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        written = time.perf_counter() - start
        with probe.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            whole = all(file.read(len(block)) == block for _ in range(_PROBE_BYTES // len(block)))
            read = time.perf_counter() - start
    finally:
        probe.unlink(missing_ok=True)
    rate = lambda seconds: f"{_PROBE_BYTES / max(seconds, 1e-9) / 1e9:.2f} GB/s"  # noqa: E731
    text = f"writes {rate(written)}, reads {rate(read)}"
    return Check(
        "storage", whole, text, "" if whole else "what was written came back changed: do not train on this volume"
    )


def _clock(wanted: Wanted) -> Check:
    """Compare the node's clock with the clock of the storage, which all nodes see."""
    probe = wanted.storage / f".clock-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        skew = abs(probe.stat().st_mtime - time.time())
    finally:
        probe.unlink(missing_ok=True)
    ok = skew <= _CLOCK_S
    return Check("clock", ok, f"{skew:.2f} s from the storage's", "" if ok else "start chrony or ntpd on the node")


def _names(wanted: Wanted) -> Check:
    if not wanted.names:
        return Check("names", None, "nothing to look up")
    for name in wanted.names:
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            return Check("names", False, f"{name}: {error}", "the headless Service or the cluster's DNS is missing")
    return Check("names", True, f"{wanted.names[0]} is {address}")


def _tokens(wanted: Wanted) -> Check:
    """Check that the secrets are set. Their values are never shown."""
    if not wanted.tokens:
        return Check("tokens", None, "none asked for")
    absent = [name for name in wanted.tokens if not os.environ.get(name)]
    ok = not absent
    text = f"{len(wanted.tokens) - len(absent)} of {len(wanted.tokens)} set"
    return Check("tokens", ok, text, "" if ok else f"{', '.join(absent)}: the Secret's key is empty")


def judge_bandwidth(
    wanted: Wanted, measured: Sequence[tuple[str, float]], transport: str | None, *, collnet: bool = False
) -> list[Check]:
    """Return the checks of transport and bandwidth between nodes.

    Args:
        measured: (nodes, bus bandwidth in GB/s) for all nodes together and for pairs of nodes.
        transport: the network NCCL uses, if its log says so.
        collnet: NCCL reduces inside the network.
    """
    checks = []
    if wanted.sharp:
        fix = (
            "" if collnet else "leave cluster.sharp out, or use an image and driver whose SHARP versions fit each other"
        )
        checks.append(Check("sharp", collnet, "in use" if collnet else "asked for, and NCCL does not use it", fix))
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
    wanted: Wanted, own: Sequence[Check], probed: Mapping[str, Any] | None, *, as_json: bool, speak: bool = True
) -> int:
    """Print the results on the rank with `speak` and return the exit code, which is the same on every rank."""
    reports: dict[str, Sequence[Check]] = {socket.gethostname(): own}
    if probed is not None:
        reports = {node: [Check(**check) for check in checks] for node, checks in probed["nodes"].items()}
        reports["all nodes"] = judge_bandwidth(
            wanted, probed["measured"], probed["transport"], collnet=probed["collnet"]
        )
    well = all(check.ok is not False for checks in reports.values() for check in checks)
    if speak and as_json:
        say(json.dumps({"ok": well, "nodes": {n: [check.as_dict() for check in c] for n, c in reports.items()}}))
    elif speak:
        describe(reports, say)
    return EXIT_DONE if well else EXIT_REFUSED


def describe(reports: Mapping[str, Sequence[Check]], say: Callable[[str], None]) -> None:
    """Print a line for each check, then each failed check with its node and its fix."""
    words = {True: "ok", False: "FAILED", None: "-"}
    for node, checks in reports.items():
        for check in checks:
            say(f"{node:<20} {check.name:<11} {words[check.ok]:<7} {check.found}")
    bad = {node: [check for check in checks if check.ok is False] for node, checks in reports.items()}
    for node, checks in bad.items():
        for check in checks:
            say(f"{node}: {check.name}: {check.found}" + (f"\n  fix: {check.fix}" if check.fix else ""))

"""Checks of one node before training: GPUs, compiler, limits, devices, names, secrets. Each says what it found and what to do about it.

Nothing here needs torch. `argosy.launch.storage_checks` has those of the shared volume.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from argosy.config.counts import checkpoint_bytes
from argosy.config.schema import RunSpec
from argosy.launch.fabric import card_count
from argosy.launch.placement import gib
from argosy.launch.registry import find_target
from argosy.plan.hardware import Instance

_GIB = 2**30
# The memory RDMA must be able to pin. With less, the first connection fails with a message about memory.
_MEMLOCK = 16 * _GIB
_LEAST_SHM = 1 * _GIB
_INFINIBAND = Path("/sys/class/infiniband")
# The oldest driver series that runs a CUDA of each major version.
_DRIVERS = {12: 525, 13: 580}
# Where an image keeps NVIDIA's libraries that let an older driver run a newer CUDA.
_FORWARD_COMPATIBLE = Path("/usr/local/cuda/compat")


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
    # One checkpoint, and the nodes that write it together.
    saved_bytes: int = 0
    nodes: int = 1
    names: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    # The least bus bandwidth between nodes, in GB/s.
    floor: float | None = None
    # Reductions run inside the network (InfiniBand SHARP).
    sharp: bool = False
    # The topology file that NCCL has to read.
    topology: str | None = None
    # Programs that the target starts in the image.
    programs: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: RunSpec, instance: Instance | None, fabric: str, environ: Mapping[str, str]) -> Wanted:
        cluster = spec.cluster
        one = checkpoint_bytes(spec.model, spec.optim.rule)
        saved = one * (spec.checkpoint.keep + 1)
        if cluster is None:
            return cls(storage=Path(spec.runs_dir), needed_bytes=saved, saved_bytes=one)
        gpus = cluster.gpus if cluster.gpus is not None else (instance.gpus if instance is not None else None)
        known = 0 if instance is None else card_count(instance, gpus or instance.gpus)
        cards = cluster.nics if cluster.nics is not None else known
        master = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR")
        # `--target local` runs the same spec here, where no operator starts anything.
        in_pod = "KUBERNETES_SERVICE_HOST" in environ
        return cls(
            gpus=gpus,
            fabric=fabric,
            nics=cards if fabric not in ("none", "tcp") else 0,
            shm_bytes=gib(cluster.shm) * _GIB if cluster.shm and find_target(cluster.target).makes_pods else _LEAST_SHM,
            storage=Path(spec.runs_dir),
            needed_bytes=saved,
            saved_bytes=one,
            nodes=cluster.nodes,
            names=() if master is None else (master,),
            tokens=tuple(cluster.secrets),
            floor=cluster.allreduce_floor or (instance.allreduce_floor if instance is not None else None),
            sharp=cluster.sharp,
            topology=environ.get("NCCL_TOPO_FILE"),
            programs=tuple(find_target(cluster.target).programs(cluster)) if in_pod else (),
        )


def check_gpus(wanted: Wanted) -> Check:
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
    cuda, least = _needed_driver()
    if rows[0][1].split(".")[0].isdigit() and int(rows[0][1].split(".")[0]) < least:
        return Check(
            "gpus",
            False,
            f"{text}; torch is built for CUDA {cuda}, which needs {least} or newer",
            f"a node image or GPU operator with driver {least} or newer, or an image whose torch is built for an older CUDA",
        )
    if wanted.gpus and len(rows) != wanted.gpus:
        return Check(
            "gpus",
            False,
            f"{text}; {wanted.gpus} were asked for",
            "a GPU has fallen off the bus, or the pod asks for fewer",
        )
    return Check("gpus", True, text)


def _needed_driver() -> tuple[str, int]:
    """Return the CUDA version this torch was built for and the oldest driver series that runs it; 0 if any driver does."""
    torch = find_spec("torch")
    stated = "" if torch is None or torch.origin is None else Path(torch.origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda\b.*'([0-9]+)\.([0-9]+)'", stated, re.MULTILINE)
    if cuda is None or _FORWARD_COMPATIBLE.is_dir():
        return "", 0
    return f"{cuda[1]}.{cuda[2]}", _DRIVERS.get(int(cuda[1]), 0)


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


def check_compiler(wanted: Wanted) -> Check:
    """Check that Triton can compile its launcher, which it does when a kernel is first used on a GPU."""
    if not wanted.gpus:
        return Check("compiler", None, "no kernel is compiled without a GPU")
    fix = "an image with gcc, libc6-dev and Python's headers, as docker/Dockerfile makes; cluster.env.CC names another compiler"
    tool = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if tool is None:
        return Check("compiler", False, "this image has no C compiler, and Triton compiles its launcher with one", fix)
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if not header.exists():
        return Check("compiler", False, f"{tool}, but there is no {header}", fix)
    return Check("compiler", True, tool)


def check_programs(wanted: Wanted) -> Check:
    """Check that the image has what the target starts instead of `argosy`: preflight itself does not need it."""
    if not wanted.programs:
        return Check("programs", None, "argosy alone")
    absent = [program for program in wanted.programs if shutil.which(program) is None]
    if not absent:
        return Check("programs", True, ", ".join(wanted.programs))
    fix = "build docker/Dockerfile.efa with --build-arg HYPERPOD_AGENT=…, as its first lines say, and give its digest as cluster.image; or cluster.operator=kubeflow"
    return Check("programs", False, f"{', '.join(absent)} is not in this image, and training starts with it", fix)


def check_memlock(wanted: Wanted) -> Check:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _GIB:.2f} GiB"
    if wanted.fabric in ("none", "tcp"):
        return Check("memlock", None, text)
    enough = soft == resource.RLIM_INFINITY or soft >= _MEMLOCK or _may_lock()
    fix = (
        "RDMA pins its buffers, and containers inherit the limit of containerd on the node: an administrator applies "
        "charts/node-memlock.yaml once, or makes nodes with LimitMEMLOCK=infinity. The capability IPC_LOCK has no effect for an ordinary user"
    )
    return Check("memlock", enough, text, "" if enough else fix)


def _may_lock() -> bool:
    """Return whether the process has CAP_IPC_LOCK, which lifts the memlock limit."""
    status = Path("/proc/self/status").read_text()
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 14 & 1)


def check_shm(wanted: Wanted) -> Check:
    usage = os.statvfs("/dev/shm")
    size = usage.f_blocks * usage.f_frsize
    ok = size >= wanted.shm_bytes
    return Check(
        "shm", ok, f"{size / _GIB:.1f} GiB", "" if ok else "cluster.shm=…: NCCL and data loading share memory there"
    )


def check_devices(wanted: Wanted) -> Check:
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


def check_names(wanted: Wanted) -> Check:
    if not wanted.names:
        return Check("names", None, "nothing to look up")
    for name in wanted.names:
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            return Check("names", False, f"{name}: {error}", "the headless Service or the cluster's DNS is missing")
    return Check("names", True, f"{wanted.names[0]} is {address}")


def check_tokens(wanted: Wanted) -> Check:
    """Check that the secrets are set. Their values are never shown."""
    if not wanted.tokens:
        return Check("tokens", None, "none asked for")
    absent = [name for name in wanted.tokens if not os.environ.get(name)]
    ok = not absent
    text = f"{len(wanted.tokens) - len(absent)} of {len(wanted.tokens)} set"
    return Check("tokens", ok, text, "" if ok else f"{', '.join(absent)}: the Secret's key is empty")


NODE_CHECKS = (
    check_gpus,
    check_compiler,
    check_programs,
    check_memlock,
    check_shm,
    check_devices,
    check_names,
    check_tokens,
)

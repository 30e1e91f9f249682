"""The rank of this process and the world size, read from the environment of any launcher.

The first of these that is set decides:

1. torchrun, PyTorchJob, TrainJob, `argosy train --nproc`: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
2. JobSet and indexed Jobs, one process in a pod: JOB_COMPLETION_INDEX as the rank, with WORLD_SIZE and MASTER_ADDR.
3. Slurm's srun, one task for each process: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; the first host of SLURM_JOB_NODELIST,
   and a port derived from SLURM_JOB_ID. A single task is an ordinary process.
4. None of these: one process.

`argosy train --nproc` starts several processes on each node. The index and number of nodes come from PET_NODE_RANK and
PET_NNODES (Kubeflow), JOB_COMPLETION_INDEX and NNODES, NODE_RANK and NNODES, or SLURM_NODEID and SLURM_NNODES, in the same way.
A number of nodes without an index is refused: every node would start a world of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from argosy.errors import ArgosyError

DEFAULT_PORT = 29500
# Variables with the index of a node and the number of nodes.
_NODE_PAIRS = (
    ("PET_NODE_RANK", "PET_NNODES"),
    ("JOB_COMPLETION_INDEX", "NNODES"),
    ("NODE_RANK", "NNODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
)


@dataclass(frozen=True)
class World:
    """The rank of this process, the world size, and the address of rank 0. `source` names the variables that say so."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    address: str = "localhost"
    port: int = DEFAULT_PORT
    source: str = "one process"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, for the agent that starts several ranks on each."""

    index: int = 0
    count: int = 1
    address: str = "localhost"
    port: int = DEFAULT_PORT

    def with_ranks(self, each: int) -> World:
        """Return the world of a job with `each` ranks on every node, as its rank 0 sees it."""
        machines = "" if self.count == 1 else f" on each of {self.count} nodes"
        return World(0, 0, each * self.count, self.address, self.port, f"--nproc {each}{machines}")


def find_world(environ: Mapping[str, str]) -> World:
    """Return the rank of this process and the world size."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        local = "LOCAL_RANK" if "LOCAL_RANK" in environ else None
        return _world(environ, "RANK", "WORLD_SIZE", local, "RANK and WORLD_SIZE")
    if "JOB_COMPLETION_INDEX" in environ and "WORLD_SIZE" in environ:
        return _world(environ, "JOB_COMPLETION_INDEX", "WORLD_SIZE", None, "JOB_COMPLETION_INDEX and WORLD_SIZE")
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_NTASKS", default=1) > 1:
        return _world(environ, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_PROCID and SLURM_NTASKS")
    return World()


def find_nodes(environ: Mapping[str, str]) -> Nodes:
    """Return the index of this node and the number of nodes."""
    for index, count in _NODE_PAIRS:
        if index in environ and count in environ:
            found = Nodes(_number(environ, index), _number(environ, count), *_master(environ))
            _require_inside(found.index, found.count, index, count)
            _require_address(environ, found.address, f"{count} says that there are {found.count} nodes", found.count)
            return found
    # A rank of torchrun knows its place. Such a variable may be left over from the script that called torchrun.
    if "RANK" not in environ and _number(environ, "NNODES", default=1) > 1:
        raise ArgosyError(
            "launch.environment",
            f"NNODES is {environ['NNODES']}, and no variable has the index of this node",
            key="NODE_RANK",
            fix="set NODE_RANK to 0 on the first node, 1 on the next, and MASTER_ADDR to the host of the first; or unset NNODES "
            "for a run on this node alone",
        )
    return Nodes()


def _world(environ: Mapping[str, str], rank: str, size: str, local: str | None, source: str) -> World:
    address, port = _master(environ)
    found = World(
        _number(environ, rank),
        0 if local is None else _number(environ, local, default=0),
        _number(environ, size),
        address,
        port,
        source,
    )
    _require_inside(found.rank, found.size, rank, size)
    _require_address(environ, address, f"{size} says that there are {found.size} ranks", found.size)
    return found


def _require_address(environ: Mapping[str, str], address: str, known: str, count: int) -> None:
    if count > 1 and address == "localhost" and "MASTER_ADDR" not in environ:
        raise ArgosyError(
            "launch.environment",
            f"{known}, and nothing says where the first of them listens",
            key="MASTER_ADDR",
            fix="set MASTER_ADDR to the host of rank 0; torchrun, PyTorchJob and TrainJob do so, and under srun the first host "
            "of SLURM_JOB_NODELIST is taken",
        )


def _require_inside(index: int, count: int, index_name: str, count_name: str) -> None:
    if not 0 <= index < count:
        raise ArgosyError(
            "launch.environment",
            f"{index_name} is {index}, and {count_name} is {count}: the first goes from 0 to one less than the second",
            key=index_name,
            value=index,
            fix="start every process by the same launcher, and leave these variables to it",
        )


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port of rank 0."""
    for prefix in ("MASTER", "PET_MASTER"):
        if f"{prefix}_ADDR" in environ:
            return environ[f"{prefix}_ADDR"], _number(environ, f"{prefix}_PORT", default=DEFAULT_PORT)
    if "SLURM_JOB_NODELIST" in environ:
        # Jobs that share a host must use different ports.
        port = 20_000 + _number(environ, "SLURM_JOB_ID", default=0) % 20_000
        return first_host(environ["SLURM_JOB_NODELIST"]), port
    return "localhost", DEFAULT_PORT


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gpu[07-09,12],login1` begins with gpu07."""
    name = re.match(r"[^,\[]+(\[[^\]]*\][^,\[]*)*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes if name is None else name[0])


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ArgosyError(
            "launch.environment",
            f"{name} is {text!r}, and has to be a whole number",
            key=name,
            value=text,
            fix="start every process by the same launcher, and leave these variables to it",
        ) from None

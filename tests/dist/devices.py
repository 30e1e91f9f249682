"""Which device the ranks of a pool compute on: the CPU with gloo; or, with ARGOSY_TEST_GPU set, the GPUs of this machine with NCCL.

NCCL refuses two ranks on one GPU of one host. Where the machine has fewer GPUs than ranks, each rank claims a host of its own, and they
talk over loopback sockets: slow, but streams, order of kernels and collectives, memory and numbers are those of real ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from argosy.config.schema import ParallelSpec
from argosy.parallel.mesh import Mesh, make_mesh

ON_GPU = bool(os.environ.get("ARGOSY_TEST_GPU"))
MOST_RANKS = 8  # of a case of the matrix
BACKEND = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"


def claim(place: int) -> None:
    """Give this process, the one at `place` of its pool, a device and the variables NCCL reads. Call it before any other work."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ON_GPU:
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(own_place(place))
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_GRAPH_REGISTER": "0"}
        if gpus < MOST_RANKS:
            # One connection for each pair: a case of eight ranks spends most of its time on connecting.
            few = dict.fromkeys(("NCCL_MAX_NCHANNELS", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS"), "1")
            os.environ.update(few, NCCL_HOSTID=f"h{place}", NCCL_RAS_ENABLE="0")


def own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def own_place(rank: int) -> int:
    """Which GPU of this machine a rank of the pool has; its rank on a CPU."""
    return rank % torch.cuda.device_count() if ON_GPU else rank


def own_mesh(parallel: ParallelSpec) -> Mesh:
    """The mesh of the pool's process group; of one rank in a process without one."""
    return make_mesh(parallel, own_device()) if dist.is_initialized() else Mesh(own_device())

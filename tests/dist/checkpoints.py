"""What ranks of a pool do with checkpoints."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint import store
from argosy.checkpoint.manifest import OPTIMIZER, WEIGHTS, TrainProgress
from argosy.checkpoint.save import contents, save
from argosy.checkpoint.save_plan import make_plan
from argosy.checkpoint.store import latest, load_into
from argosy.parallel.host_group import make_host_group
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.shards import local, whole
from argosy.train.optimizer import Optimizer
from dist.devices import own_mesh
from dist.training import batch_of, set_initial_weights, share_of, spec_of, take_step

State = dict[str, np.ndarray]


def _session(model: str, layout: str) -> tuple[Optimizer, object, Mesh]:
    spec = spec_of(model, f"{layout} micro_batch=4")
    mesh = own_mesh(spec.parallel)
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    set_initial_weights(optimizer, engine, spec)
    return optimizer, engine, mesh


def _groups(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    return {WEIGHTS: optimizer.weights(), OPTIMIZER: optimizer.tensors()}


def _whole(optimizer: Optimizer) -> State:
    return {
        f"{g}/{n}": whole(t).numpy(force=True).copy() for g, ts in _groups(optimizer).items() for n, t in ts.items()
    }


def train_and_save(model: str, layout: str, root: str) -> State:
    """A step of training, so that the optimiser has a state, saved; and what was saved, whole."""
    optimizer, engine, mesh = _session(model, layout)
    take_step(engine, optimizer, share_of(batch_of(model, 1), mesh), step=1, lr=1e-2)
    save(
        Path(root),
        TrainProgress(1, 16, optimizer.numbers()),
        optimizer.weights(),
        optimizer.tensors(),
        make_host_group(),
    )
    return _whole(optimizer)


def load_saved(model: str, layout: str, root: str) -> State:
    """What a fresh session of this layout has after loading."""
    optimizer, _, _ = _session(model, layout)
    hosts = make_host_group()
    found = latest(Path(root), report=print, hosts=hosts)
    assert found is not None
    # Several pieces of most tensors: a row, or a few.
    with patch.object(store, "_PIECE", 256):
        load_into(found.weights(), optimizer.weights(), found.path, hosts)
        load_into(found.optimizer(), optimizer.tensors(), found.path, hosts)
    return _whole(optimizer)


def bytes_to_write(model: str, layout: str) -> tuple[int, int]:
    """(what this rank writes, what the state takes in all)"""
    optimizer, _, _ = _session(model, layout)
    groups, hosts = _groups(optimizer), make_host_group()
    files = contents(make_plan(groups, hosts), groups, hosts)
    mine = sum(tensor.nbytes for content in files.values() for tensor in content.tensors)
    return mine, sum(t.numel() * local(t).element_size() for tensors in groups.values() for t in tensors.values())


def save_two_ways_cut(root: str, tp_dim: int, fsdp: bool, stages: bool) -> None:
    """A matrix cut by tensor parallelism and, within that, by FSDP; sizes divide nothing. With stages, the first two ranks hold
    one matrix, the others another, and all of them a tied one."""
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = dist.get_rank()
    if stages:
        mine = ["tied", f"stage{rank // 2}"]
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        tensors = {
            n: distribute_tensor(_numbers(n), meshes[rank // 2], [Shard(tp_dim)], src_data_rank=None) for n in mine
        }
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(5, 7, bias=False)
        cut = distribute_tensor(_numbers("cut"), mesh["tp"], [Shard(tp_dim)], src_data_rank=None)
        layer.weight = nn.Parameter(cut)
        if fsdp:
            fully_shard(layer, mesh=mesh["dp"])
        tensors = {"cut": layer.weight.detach(), "plain": torch.arange(3.0), "number": torch.tensor(7.0)}
    save(Path(root), TrainProgress(1, 16), tensors, tensors, make_host_group())
    hosts, empty = make_host_group(), {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = latest(Path(root), report=print, hosts=hosts)
    assert found is not None
    with patch.object(store, "_PIECE", 1):
        load_into(found.weights(), empty, found.path, hosts)
    assert all(torch.equal(local(empty[name]), local(tensor)) for name, tensor in tensors.items())


def _numbers(name: str) -> Tensor:
    return torch.arange(35.0).view(7, 5) + len(name) * 100


def expected_numbers(name: str) -> np.ndarray:
    numbers: np.ndarray = _numbers(name).numpy()
    return numbers

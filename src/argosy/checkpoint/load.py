"""Loading a checkpoint into tensors of any layout: each rank reads only the slices that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from torch import Tensor

from argosy.checkpoint.store import require_names
from argosy.checkpoint.stored import StoredTensors
from argosy.errors import ArgosyError
from argosy.parallel.host_group import ALONE, HostGroup
from argosy.parallel.shards import held_boxes


@torch.no_grad()
def load_into(stored: StoredTensors, tensors: Mapping[str, Tensor], where: Path, hosts: HostGroup = ALONE) -> None:
    """Fill this rank's slices of the tensors. All ranks together must have exactly the stored names."""
    messages = hosts.gather(orjson.dumps(list(tensors)))
    names: list[str] = orjson.loads(hosts.tell(orjson.dumps(sorted({n for m in messages for n in orjson.loads(m)}))))
    require_names(stored.keys(), set(names), where)
    for name, tensor in tensors.items():
        found, wanted = stored.infos[name].shape, tuple(tensor.shape)
        if found != wanted:
            raise ArgosyError(
                "checkpoint.mismatch",
                f"{where}: {name} has shape {list(found)}, the model wants {list(wanted)}",
                fix="check model and run name",
            )
        for held in held_boxes(tensor):
            held.of(tensor).copy_(stored.read_box(name, held.box))

"""Master weights: the fp32 copies that Megatron's optimiser keeps of 16-bit parameters, stored under names of their own. A run
that starts from them loses nothing; the model's own weights have been rounded once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from argosy.checkpoint.megatron.torch_dist import TorchDist
from argosy.checkpoint.megatron.weight_names import Part, Piece
from argosy.checkpoint.tensors import TensorInfo
from argosy.errors import ArgosyError

_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_param|param)\.(?P<of>.+)")


@dataclass(frozen=True)
class Master(Part):
    """A parameter of ours from its fp32 master weights. Their rounding must equal the model's 16-bit weights."""

    rounded: Part

    def read(self, source: TorchDist) -> Tensor:
        whole = super().read(source)
        if not torch.equal(whole.to(self.rounded.info.dtype), self.rounded.read(source)):
            raise ArgosyError(
                "megatron.bad-files",
                f"{source.directory}: {self.rounded.pieces[0].name} is not the rounding of the optimiser's 32-bit weights",
                fix="give --no-masters to import the model's own weights",
            )
        return whole


def with_masters(table: Mapping[str, Part], stored: Mapping[str, TensorInfo]) -> dict[str, Part] | None:
    """Return the table with master weights for each 16-bit parameter.

    Returns None if a master is missing or sharded in another way than its parameter, or if no parameter has 16 bits.
    """
    masters = {found["of"]: name for name in stored if (found := _MASTER.fullmatch(name)) is not None}
    result: dict[str, Part] = {}
    for name, part in table.items():
        if part.info.dtype == torch.float32:
            result[name] = part
            continue
        pieces = [Piece(masters.get(piece.name, ""), piece.box) for piece in part.pieces]
        for theirs, own in zip(pieces, part.pieces, strict=True):
            if stored.get(theirs.name) != replace(stored[own.name], dtype=torch.float32):
                return None
        result[name] = Master(name, TensorInfo(torch.float32, part.info.shape), pieces, part)
    return None if result == dict(table) else result

"""The 32-bit weights that Megatron's optimiser keeps of a model in 16 bits, stored beside it under names of their own. A run that
goes on from these loses nothing; from the model's own, every weight has been rounded once."""

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
    """One of our parameters in 32 bits, and in the model's own precision, which must be its rounding."""

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
    """The table with a master for each parameter of 16 bits; None where one is missing or cut as no model's tensor is, and
    where there is nothing in 16 bits."""
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

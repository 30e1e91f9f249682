"""Forward passes over whole texts, which return logits: the inputs as a layout needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.schema import ParallelSpec
from argosy.parallel.cp import Cut, cut_parts
from argosy.parallel.mesh import Mesh


def required(logits_at: Tensor | None) -> Tensor:
    """Return the tokens whose logits are wanted: ranks that share a sequence cannot hand out those of all."""
    if logits_at is None:
        raise AssertionError("a layout that shares sequences or layers needs logits_at")
    return logits_at


@dataclass(frozen=True)
class TextInputs:
    """Makes the inputs of this rank from whole texts, whose length need not fit the layout."""

    # Sequences are padded to a multiple of this.
    multiple: int = 1
    cut: Cut | None = None

    @staticmethod
    def of(mesh: Mesh, parallel: ParallelSpec) -> TextInputs:
        cut = Cut.of(mesh)
        shares = parallel.tp if parallel.sp else 1
        return TextInputs(shares if cut is None else 2 * cut.ranks * shares, cut)

    @property
    def takes_tokens_alone(self) -> bool:
        """True if a pass may have a single token, as with a key/value cache."""
        return self.multiple == 1

    def __call__(self, tokens: Tensor, logits_at: Tensor, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a decoder by name.

        Padding comes after the text, where no token sees it. `logits_at` numbers the tokens of the whole batch on every rank.
        """
        width = tokens.shape[1]
        missing = -width % self.multiple
        inputs = {"tokens": tokens, **others}
        if missing:
            inputs.setdefault("positions", torch.arange(width, device=tokens.device)[None])
            inputs = {name: F.pad(value, (0, missing)) for name, value in inputs.items()}
            logits_at = logits_at // width * (width + missing) + logits_at % width
        if self.cut is not None:
            inputs = cut_parts(self.cut, inputs)
        return inputs | {"logits_at": logits_at}

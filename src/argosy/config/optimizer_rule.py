"""The `Rule` of an optimiser: everything about it that needs no torch.

The run spec reads a rule's keys, and the planner its bytes and seconds. Training reads its state tensors and which parameters it
updates. Each optimiser declares its rule in a module of `config/optimizers/`, and computes its update in `train/<name>_update.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from argosy.config.model import Section

StateDtype = Literal["fp32", "bf16"]
_BYTES: dict[StateDtype, int] = {"fp32": 4, "bf16": 2}


class PlannedRank(Protocol):
    """One rank of a planned layout, as the planner describes it to a rule."""

    @property
    def layers(self) -> int:
        """The number of layers on the rank."""

    @property
    def matrices(self) -> Sequence[tuple[float, float, float]]:
        """The matrices in an average layer that the rank updates whole, as (rows, columns, how many)."""

    def matmul_seconds(self, rows: float, columns: float, inner: float) -> float:
        """Return the seconds of a 16-bit matmul [rows, inner] x [inner, columns]."""

    def gather_seconds(self, bytes_per_number: float) -> float:
        """Return the seconds to all-gather one layer's sharded matrices on every rank that needs them whole."""


def _no_seconds(keys: Any, rank: PlannedRank) -> float:
    return 0.0


def _no_bytes(largest_matrix: float) -> float:
    return 0.0


@dataclass(frozen=True, eq=False)
class Rule:
    """The declaration of one optimiser.

    Attributes:
        name: what `optim.name` is set to; `train/<name>_update.py` has the update.
        title: the name in prose.
        keys: the rule's own keys in the run spec, a section `optim.<name>`.
        inline: the keys stand in `optim` itself. True for AdamW only, whose keys are older than the sections.
        state: name and dtype of each tensor the rule keeps for a parameter, shaped like it. Checkpoints use the names.
        keeps: what those tensors are, in prose.
        rest: None if the rule updates all parameters. Otherwise it updates the matrices inside the layers (stacks of experts
            included), and `rest` updates embeddings, output head, norms and biases.
        bytes_moved: bytes of a parameter that an update reads and writes, the gradient norm included.
        working_bytes: device memory an update needs beside gradients and state, given the number of elements of the largest whole matrix.
        extra_seconds: seconds of an update beyond `bytes_moved`, given the rule's keys and a rank.
        extra_formula: what those seconds are, for `argosy plan --explain`.
        names_elsewhere: the optimiser's names in other trainers' settings, by trainer.
    """

    name: str
    title: str
    keys: type[Section]
    state: Mapping[str, StateDtype]
    keeps: str
    bytes_moved: float
    inline: bool = False
    rest: Rule | None = None
    working_bytes: Callable[[float], float] = _no_bytes
    extra_seconds: Callable[[Any, PlannedRank], float] = _no_seconds
    extra_formula: str = ""
    names_elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """The bytes of the state tensors for one parameter that this rule updates."""
        return sum(_BYTES[dtype] for dtype in self.state.values())

    @property
    def parts(self) -> tuple[Rule, ...]:
        """The rules of a run with this optimiser: this one, and the one for the rest of the parameters."""
        return (self,) if self.rest is None else (self, *self.rest.parts)

    def rule_for(self, *, hidden_matrix: bool) -> Rule:
        """Return the rule that updates a parameter, given whether it is a matrix inside the layers."""
        return self if self.rest is None or hidden_matrix else self.rest

    def shares(self, matrices: float, others: float) -> list[tuple[Rule, float]]:
        """Return each rule with the number of parameters it updates, out of `matrices` inside the layers and `others`."""
        return [(self, matrices + others)] if self.rest is None else [(self, matrices), (self.rest, others)]

    def key_path(self, key: str) -> str:
        """Return the dotted path of one of the rule's keys in the run spec."""
        return f"optim.{key}" if self.inline else f"optim.{self.name}.{key}"

    def settings(self, optim: Section) -> Section:
        """Return the rule's keys in a run spec's `optim`, with defaults for a section that was left out."""
        if self.inline:
            return self.keys.model_construct(**{key: getattr(optim, key) for key in self.keys.model_fields})
        return getattr(optim, self.name) or self.keys()

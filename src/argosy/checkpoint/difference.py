"""`argosy ckpt diff`: which tensors differ between two models, and by how much. One tensor of each is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from argosy.checkpoint.source import Source, open_source
from argosy.console.formats import amount
from argosy.console.progress_bar import ProgressBar


@dataclass(frozen=True)
class Moved:
    """The difference of one tensor between two models.

    changed: elements that differ.
    largest: largest absolute difference.
    relative: norm of the difference divided by the norm of the first.
    """

    name: str
    numbers: int
    changed: int
    largest: float
    relative: float


@dataclass(frozen=True)
class Difference:
    first: str
    second: str
    only_first: list[str]
    only_second: list[str]
    reshaped: list[str]
    # Tensors that are equal bit for bit.
    same: int
    # Largest relative difference first.
    moved: list[Moved]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self, most: int) -> str:
        lines = [f"{self.first} -> {self.second}: {self.same} tensors are equal, {len(self.moved)} moved"]
        missing = [("only in the first", self.only_first), ("only in the second", self.only_second)]
        for label, names in (*missing, ("of another shape", self.reshaped)):
            if names:
                lines.append(f"{label}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if names[4:] else ""))
        if self.moved:
            lines.append(f"{'relative':>10}  {'largest':>10}  {'changed':>8}  {'numbers':>8}  tensor")
        for one in self.moved[:most]:
            share = f"{one.changed / one.numbers:.0%}"
            lines.append(
                f"{one.relative:>10.3g}  {one.largest:>10.3g}  {share:>8}  {amount(one.numbers):>8}  {one.name}"
            )
        if self.moved[most:]:
            lines.append(f"and {len(self.moved) - most} more, which moved less (--top {len(self.moved)})")
        return "\n".join(lines)


def compare(first: str, second: str, *, optimizer: bool = False) -> Difference:
    """Compare two runs, checkpoints, imported models or Hugging Face directories, in any layouts."""
    one, other = _readers(open_source(first), optimizer), _readers(open_source(second), optimizer)
    shared = [name for name in one if name in other]
    reshaped, moved, same = [], [], 0
    with ProgressBar("diff", len(shared), " tensors") as bar:
        for name in shared:
            a, b = one[name](), other[name]()
            bar.advance(1)
            if a.shape != b.shape:
                reshaped.append(name)
            elif (found := _moved(name, a.double(), b.double())).changed:
                moved.append(found)
            else:
                same += 1
    moved.sort(key=lambda found: -found.relative)
    return Difference(
        first, second, [n for n in one if n not in other], [n for n in other if n not in one], reshaped, same, moved
    )


def _readers(source: Source, optimizer: bool) -> dict[str, Callable[[], Tensor]]:
    """Return a reader for each tensor, by name."""
    found: dict[str, Callable[[], Tensor]] = {name: partial(source.read, name) for name in source.infos}
    if optimizer and source.checkpoint is not None:
        state = source.checkpoint.optimizer()
        found |= {f"optimizer: {name}": partial(state.__getitem__, name) for name in state}
    return found


def _moved(name: str, a: Tensor, b: Tensor) -> Moved:
    difference = b - a
    norm = float(a.norm())
    size = float(difference.norm())
    return Moved(
        name,
        a.numel(),
        int((~((a == b) | (a.isnan() & b.isnan()))).sum()),
        float(difference.abs().max()) if a.numel() else 0.0,
        size / norm if norm else size,
    )

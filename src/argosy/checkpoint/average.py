"""`argosy ckpt average`: the mean of the weights of several checkpoints, as a model directory.

One parameter of each checkpoint is in memory at a time. Sums are in float64, so that the order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from argosy.checkpoint.assets import copy_assets
from argosy.checkpoint.model_directory import write_model
from argosy.checkpoint.source import Source, open_source
from argosy.checkpoint.staging import require_space, staged
from argosy.checkpoint.store import listed, require_names
from argosy.config.start import differences, model_root
from argosy.console.formats import volume
from argosy.console.progress_bar import ProgressBar
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Averaged:
    sources: list[str]
    steps: list[int]
    to: str
    bytes: int

    def describe(self, *, done: bool) -> str:
        lines = [
            f"{'averaged' if done else 'would average'} {len(self.sources)} checkpoints, {volume(self.bytes)} of weights:"
        ]
        lines += [f"  step {step:,}  {where}" for step, where in zip(self.steps, self.sources, strict=True)]
        return "\n".join([*lines, f"to {self.to}; sample, evaluate or export it, or start a run from it (init_from)"])


def average(wheres: Sequence[str], to: Path, *, last: int | None = None, dry_run: bool = False) -> Averaged:
    """Write the average of several checkpoints, or of the `last` ones of a run, to `to`."""
    sources = [open_source(where) for where in _expanded(wheres, last)]
    _require_alike(sources)
    first = sources[0]
    size = sum(info.nbytes for info in first.infos.values())
    facts = Averaged([source.where for source in sources], [source.step for source in sources], str(to), size)
    require_space(to, size)
    if dry_run:
        return facts
    with staged(to) as stage, ProgressBar("average", size, "B") as bar:
        write_model(stage, first, f"average of {', '.join(facts.sources)}", first.infos, _mean(sources, bar))
        copy_assets(first.root, stage)
    return facts


def _expanded(wheres: Sequence[str], last: int | None) -> list[str]:
    if last is not None and len(wheres) == 1:
        root = model_root(Path(wheres[0]))
        wheres = [str(path) for path in listed(root / "checkpoints")[:last]]
    if len(wheres) < 2:
        raise ArgosyError(
            "config.bad-value",
            f"an average takes two checkpoints or more, and here {'is' if len(wheres) == 1 else 'are'} {len(wheres)}",
            key="CHECKPOINT",
            fix="name several, as runs/a/checkpoints/step-*, or a run and --last 5",
        )
    return list(wheres)


def _require_alike(sources: Sequence[Source]) -> None:
    first = sources[0]
    for other in sources[1:]:
        for key, there, here in differences(other.model, first.model):
            raise ArgosyError(
                "checkpoint.mismatch",
                f"{key} is {here!r} in {first.where} and {there!r} in {other.where}: their weights do not mean the same",
                fix="average checkpoints of one model",
            )
        require_names(other.infos.keys(), first.infos.keys(), Path(other.where))
        for name, info in first.infos.items():
            if other.infos[name].shape != info.shape:
                raise ArgosyError(
                    "checkpoint.mismatch",
                    f"{name} has shape {list(info.shape)} in {first.where} and {list(other.infos[name].shape)} in {other.where}",
                    fix="average checkpoints of one model",
                )


def _mean(sources: Sequence[Source], bar: ProgressBar) -> Callable[[str], Tensor]:
    def one(name: str) -> Tensor:
        info = sources[0].infos[name]
        total = torch.zeros(info.shape, dtype=torch.float64)
        for source in sources:
            total += source.read(name)
        bar.advance(info.nbytes)
        return (total / len(sources)).to(info.dtype)

    return one

"""`argosy ckpt prune`: delete checkpoints by a retention rule. The newest good one, found by its hashes, and all newer ones are
always kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from argosy.checkpoint.store import latest, remove, step_of, superfluous
from argosy.config.start import model_root, stored_description
from argosy.console.formats import volume
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Pruned:
    """The result of a prune. `kept` is the step of the newest good checkpoint."""

    run: str
    kept: int
    steps: list[int]
    bytes: int
    notes: list[str]

    def describe(self, *, done: bool) -> str:
        verb = "removed" if done else "would remove"
        steps = ", ".join(f"{step:,}" for step in self.steps) or "nothing"
        lines = [f"{verb} {steps}" + (f": {volume(self.bytes)}" if self.steps else "")]
        return "\n".join([*self.notes, *lines, f"step {self.kept:,} is the newest good one, and stays"])


def prune_run(run: Path, *, keep: int, keep_every: int | None, dry_run: bool) -> Pruned:
    root = model_root(run) / "checkpoints"
    notes: list[str] = []
    good = latest(root, notes.append)
    if good is None:
        raise ArgosyError("run.not-found", f"{run} has no checkpoint yet", fix="there is nothing to remove")
    document = stored_description(root.parent)
    keeps_best = bool(((document.get("spec") or {}).get("checkpoint") or {}).get("best"))
    doomed = superfluous(root, keep, step_of(good.path), keep_every, keep_best=keeps_best)
    size = sum(file.stat().st_size for path in doomed for file in path.iterdir() if file.is_file())
    if not dry_run:
        for path in doomed:
            remove(path)
    return Pruned(str(run), step_of(good.path), [step_of(path) for path in doomed], size, notes)

"""Rewinds: a run that skips many steps in a row goes back to its last checkpoint and passes over the samples, and stops in the end.

Skipping leaves the weights unchanged. If that does not help, earlier steps may have damaged them: the run is rewound to its newest
checkpoint, repeats the steps since then, and passes over the samples of the skipped steps. Step numbers do not change. Only the
position in the stream of samples moves, and it is part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from argosy.config.batches import Batches
from argosy.config.schema import RunSpec
from argosy.config.survival import GuardSpec
from argosy.config.units import Duration
from argosy.errors import ArgosyError
from argosy.parallel.mesh import Mesh
from argosy.parallel.replicas import odd_replicas
from argosy.parallel.shards import local
from argosy.record.jsonl import Record
from argosy.train.guard import MINIMUM, Guard
from argosy.train.optimizer import Optimizer
from argosy.train.saving import Timer


@dataclass
class Rewind(Exception):
    """A request to resume the run from its newest checkpoint."""

    # The step at which the rewind was decided.
    step: int
    reason: str
    # The samples of steps `first_bad` to `step` are passed over.
    first_bad: int | None = None
    ranks: tuple[int, ...] = ()


def watch_numbers(
    guard: Guard, step: int, batches: Batches, event: Callable[..., None], tell: Callable[[str], None]
) -> int:
    """Write skipped steps to the events and the console, and return the number in a row. Raise Rewind if there are too many."""
    skipped, streak = guard.report()
    for one in skipped:
        first = guard.position(batches.samples(one.step - 1))
        samples = [first, first + batches.size(batches.samples(one.step - 1)) - 1]
        facts = {
            "loss": one.loss,
            "grad_norm": one.grad_norm,
            "loss_limit": one.loss_limit,
            "norm_limit": one.norm_limit,
        }
        text = f"skipped, weights unchanged: {one.cause}"
        told = {key: _told(value) for key, value in facts.items()}
        event("skip", one.step, text=text, reason=one.reason, samples=samples, **told)
        tell(
            f"warning: step {one.step} {text}. Look at samples {samples[0]} to {samples[1]}; "
            f"{guard.spec.skips} skipped steps in a row rewind the run, guard=off applies every step"
        )
    if streak >= guard.spec.skips:
        reason = skipped[-1].reason if skipped else "spike"
        raise Rewind(step, reason, first_bad=step - streak + 1)
    return streak


def describe_skips(guard: Guard, steps: int) -> str | None:
    """Summarise the skips and rewinds of a run for its last lines; None if there were none."""
    if not guard.skipped and not guard.rewinds:
        return None
    rewinds = f", and rewound the run {guard.rewinds} times" if guard.rewinds else ""
    return (
        f"the guard skipped {guard.skipped} of {steps} steps{rewinds}; "
        "events.jsonl has their losses, gradient norms, limits and samples"
    )


def passing(guard: Guard, rewind: Rewind, batches: Batches) -> list[tuple[int, int]]:
    """Return the ranges of samples passed over so far, with the range that this rewind adds."""
    if rewind.first_bad is None:
        return guard.passed
    at = batches.samples(rewind.first_bad - 1)
    return [*guard.passed, (at, batches.samples(rewind.step) - at)]


def require_rewinds_left(guard: Guard, rewind: Rewind, spec: RunSpec) -> None:
    if guard.rewinds < guard.spec.rewinds:
        return
    if rewind.ranks:
        raise ArgosyError(
            "train.replica-mismatch",
            f"at step {rewind.step} the parameters of ranks {list(rewind.ranks)} differ from those of their replicas, after "
            f"{guard.rewinds} rewinds: memory or arithmetic there cannot be trusted",
            key="guard.replica_check",
            fix="take the machine out of the job, and run the same command again; heartbeat/<rank>.json names its host",
        )
    code = "train.non-finite" if rewind.reason == "non-finite" else "train.diverged"
    raise ArgosyError(
        code,
        f"steps {rewind.first_bad} to {rewind.step} were skipped ({rewind.reason}) after {guard.rewinds} rewinds to a checkpoint, "
        f"{guard.skipped} steps in all; events.jsonl has their losses and samples",
        key="optim.lr",
        value=spec.optim.lr,
        fix="lower optim.lr or lengthen optim.warmup; if only the data has changed, guard: off lets it pass"
        + ("; or train.precision=bf16, whose range is wider" if spec.train.precision == "fp16" else ""),
    )


def require_finite(record: Record, spec: RunSpec) -> None:
    """Raise ArgosyError if loss or norm is not finite, for runs without a guard, unless a lower loss scale may still help."""
    loss, grad_norm, scale = record["loss"], record["grad_norm"], record.get("loss_scale")
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    if not math.isfinite(grad_norm) and scale is not None and scale >= MINIMUM:
        return
    raise ArgosyError(
        "train.non-finite",
        f"at step {record['step']} the loss is {loss} and the gradient norm {grad_norm}; nothing was saved since"
        + ("" if scale is None else f". {record['skipped']} steps were skipped, down to a loss scale of {scale:g}"),
        key="optim.lr",
        value=spec.optim.lr,
        fix="lower optim.lr or lengthen optim.warmup, or leave `guard` on, which skips such steps; the same command would go on "
        "from the last checkpoint and, unchanged, meet the same step"
        + ("" if scale is None else "; or train.precision=bf16, whose range is wider"),
    )


class ReplicaCheck:
    """A check that replicas still hold the same bits: memory and arithmetic can fail silently.

    Digests of the weights are compared at an interval (`guard.replica_check`) and before each save, so that no checkpoint is made
    from replicas that differ. If they differ, the run is rewound to the last checkpoint.
    """

    def __init__(
        self, spec: GuardSpec | None, mesh: Mesh, optimizer: Optimizer, timer: Callable[[Duration], Timer]
    ) -> None:
        self._mesh, self._optimizer = mesh, optimizer
        every = None if spec is None else spec.replica_check
        self._group = None if every is None or mesh.size("dp_replicate") == 1 else mesh.along("dp_replicate")
        self._timer = None if every is None else timer(every)

    def check(self, step: int, saving: bool) -> None:
        if self._group is None or self._timer is None or not (self._timer.due(step) or saving):
            return
        weights = self._optimizer.weights().values()
        flags = torch.zeros(self._mesh.world_size)
        flags[odd_replicas([local(weight) for weight in weights], self._group.get_group())] = 1
        # All ranks rewind, not only those that found the difference.
        dist.all_reduce(flags)
        if flags.any():
            raise Rewind(step, "replica-mismatch", ranks=tuple(flags.nonzero().flatten().tolist()))


def _told(value: float) -> float | str:
    """Return a value that JSON can hold: NaN and infinities as text."""
    return value if math.isfinite(value) else str(value)

"""What becomes of a run whose steps are skipped one after the other: back to the last checkpoint and past the samples, then a stop.

Skipping leaves the weights as they were. If that does not help, the steps before may have done the harm: the run is rewound to
its newest checkpoint, takes the steps since again, and passes over the samples it stumbled on. The steps of the run stay what
they were; only the position in the stream of samples moves, and it is part of the checkpoint.
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
    """The run is to go on from its newest checkpoint."""

    step: int  # at which it was decided
    reason: str
    first_bad: int | None = None  # the first of the steps whose samples are to be passed over, up to `step`
    ranks: tuple[int, ...] = ()


def watch_numbers(
    guard: Guard, step: int, batches: Batches, event: Callable[..., None], tell: Callable[[str], None]
) -> int:
    """Put skipped steps on the record and the console; rewind where there are too many in a row. Returns how many there are."""
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
    """The guard's part in a run, for its last lines; nothing where it had none."""
    if not guard.skipped and not guard.rewinds:
        return None
    rewinds = f", and rewound the run {guard.rewinds} times" if guard.rewinds else ""
    return (
        f"the guard skipped {guard.skipped} of {steps} steps{rewinds}; "
        "events.jsonl has their losses, gradient norms, limits and samples"
    )


def passing(guard: Guard, rewind: Rewind, batches: Batches) -> list[tuple[int, int]]:
    """What was passed over up to now, and what is to be by this rewind."""
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
    """Without a guard: refuse to go on with numbers that are none, unless a lower loss scale may yet do."""
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
    """Whether ranks that hold the same parameters still hold the same bits: memory and arithmetic can go wrong without a word.

    Their digests are compared every so often (`guard.replica_check`) and before each save, so that no checkpoint is made of a run
    that has come apart. Where they differ the run is rewound to one that had not.
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
        dist.all_reduce(flags)  # all ranks go back, not only those that saw it
        if flags.any():
            raise Rewind(step, "replica-mismatch", ranks=tuple(flags.nonzero().flatten().tolist()))


def _told(value: float) -> float | str:
    """JSON has no word for what is not a number."""
    return value if math.isfinite(value) else str(value)

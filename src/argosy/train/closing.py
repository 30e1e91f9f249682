"""The last lines of a finished run: how long it took, its best validation loss, where it is, and what to do next."""

from __future__ import annotations

import shlex

from argosy.checkpoint.store import best_checkpoint
from argosy.console.formats import clock
from argosy.data.open import RunData
from argosy.families.hf_config import is_exportable
from argosy.record.jsonl import now, read_metrics
from argosy.record.ledger import process_started
from argosy.record.rundir import RunDir
from argosy.tasks.task_registry import task_of
from argosy.train.validations import Validations


def nothing_left(run: RunDir, step: int, steps: int, validations: Validations) -> str:
    """Describe a run that is started again after its last step."""
    if step >= steps:
        return f"{run.root}: all {steps} steps are done; train.steps={step * 2} continues the run"
    return f"{run.root}: stopped early at step {step} of {steps}, {validations.describe}; a larger eval.patience, or null, continues it"


def closing_lines(run: RunDir, first: int, data: RunData) -> list[str]:
    """Describe a run that has just taken its last step, and what can be done with it.

    Args:
        first: the step that the run resumed from, 0 for a new run.
        data: the opened data of the run. Commands that would be refused for its task or its data are left out.
    """
    # Without its file of metrics a run goes on, and ends as well.
    records = read_metrics(run.metrics) if run.metrics.is_file() else {}
    took = f"done in {clock(now() - process_started())}"
    if first:
        spent: dict[str, float] = next((one["spent"] for one in reversed(records.values()) if "spent" in one), {})
        took += f", {clock(sum(spent.values()))} with the starts before" if spent else ""
    facts = [took]
    found = {step: record["validation_loss"] for step, record in records.items() if "validation_loss" in record}
    # NaN and infinity are null in the record.
    losses = {step: loss for step, loss in found.items() if loss is not None}
    best = min(losses, key=losses.__getitem__, default=None)
    if best is not None:
        facts.append(f"best validation loss {losses[best]:.4f} at step {best}")
    elif found:
        facts.append("no validation loss was finite")
    kept = best_checkpoint(run.checkpoints)
    if best is not None and kept is not None and kept.name == f"step-{best:08d}":
        facts.append(f"commands take its checkpoint as {run.root}/best")
    command, *others = _next_commands(run, data)
    return [
        f"{'; '.join(facts)}; everything is in {run.root}",
        f"next: {command}",
        *(f"      {other}" for other in others),
    ]


def _next_commands(run: RunDir, data: RunData) -> list[str]:
    spec, root, commands = data.spec, str(run.root), []
    # Without evaluations there may be no validation split.
    if spec.eval is not None:
        commands.append(["eval", root])
    prompt = task_of(spec).example_prompt(spec)
    if prompt is not None and data.tokenizer is not None:
        commands.append(["sample", root, "--prompt", prompt])
    commands.append(["dash", str(run.root.parent)])
    if is_exportable(spec.model):
        commands.append(["ckpt", "export", root, "--to", f"{run.root.name}-hf"])
    return [shlex.join(["argosy", *words]) for words in commands]

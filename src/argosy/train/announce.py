"""What a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.counts import describe_size
from argosy.config.layout import describe_layout
from argosy.config.pipeline import describe_bubble
from argosy.parallel.precision import describe_precision, slow_precision
from argosy.record.rundir import RunDir
from argosy.train.session import Session


def opening_lines(session: Session, run: RunDir, first: int) -> list[str]:
    """The model, the layout, the batch and the data of a run that goes on after `first` steps."""
    spec, mesh, batches = session.spec, session.mesh, session.batches
    epochs = ", ".join(
        f"{count:.3g} epochs of {windows.corpus.path}"
        for windows, count in zip(
            session.stream.sets, session.stream.epochs_after(batches.samples(session.steps)), strict=True
        )
    )
    ranks = mesh.data_ranks
    accumulation = spec.train.global_batch // (spec.parallel.micro_batch * ranks)
    shared = f"{ranks} ranks x " if ranks > 1 else ""
    layout = f", {describe_layout(spec.parallel)}" if mesh.world_size > 1 else ""
    precision = describe_precision(session.engine.model, session.precision)
    return [
        f"{run.root}: {describe_size(spec.model)} on {mesh.device} in {precision}{layout}",
        f"steps {first + 1} to {session.steps}, {batches.describe(spec.data.seq_len)} (batch {spec.train.global_batch} = {shared}{accumulation} x "
        f"micro-batch {spec.parallel.micro_batch}, sequences of {spec.data.seq_len}); in all {epochs}",
    ]


def opening_warnings(session: Session) -> Iterator[tuple[str, str, bool]]:
    """(event, text, whether it is a warning) of what makes the run slow."""
    if session.mesh.size("pp") > 1:
        text, long = describe_bubble(session.spec)
        yield "bubble", text, long
    if session.mesh.is_first and (slow := slow_precision(session.spec.train.precision, session.device)):
        yield "precision", slow, True

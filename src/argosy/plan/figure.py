"""The plot of a plan: memory by category and step time by term for each layout, with the GPU's memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.config.counts import describe_size
from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.plan.search import Candidate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Categories that are sums of the others.
TOTALS = ("allocated", "device")


def write_plot(shown: Sequence[Candidate], path: Path) -> None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgosyError(
            "plan.missing-extra",
            "a plot needs matplotlib, which is not installed",
            key="--plot",
            value=path,
            fix=install_extra("plot"),
        ) from None
    names = [str(candidate.layout) for candidate in shown]
    colours = list(matplotlib.colormaps["tab20"](range(20)))
    figure = Figure(figsize=(14, 2.5 + 0.4 * len(names)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    stages = [candidate.fullest.as_dict() for candidate in shown]
    _bars(memory, names, [{k: v for k, v in stage.items() if k not in TOTALS} for stage in stages], colours)
    _bars(time, names, [candidate.time.terms for candidate in shown], colours)
    best = shown[0]
    memory.axvline(best.cluster.gpu.memory, color="black", linestyle="--", label=f"{best.cluster.gpu.name}'s memory")
    memory.set_xlabel("GiB on the fullest rank")
    time.set_xlabel("seconds of a step")
    for axes in (memory, time):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5)
    memory.invert_yaxis()
    figure.suptitle(f"{describe_size(best.work.model)}, on {best.cluster.name}")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ArgosyError(
            "plan.bad-question",
            f"{path} cannot be written: {error}",
            key="--plot",
            value=path,
            fix="give a path that ends in .png",
        ) from None


def _bars(axes: Axes, names: list[str], rows: Sequence[Mapping[str, float]], colours: list[Any]) -> None:
    """Draw one stacked bar for each row. Parts that are zero in all rows are omitted."""
    start = [0.0] * len(names)
    parts = [part for part in rows[0] if any(row[part] > 0 for row in rows)]
    for number, part in enumerate(parts):
        widths = [row[part] for row in rows]
        axes.barh(names, widths, left=start, label=part, color=colours[number % len(colours)])
        start = [a + b for a, b in zip(start, widths, strict=True)]

"""Curves as SVG, made here so that a report needs no script and prints well."""

from __future__ import annotations

import html
from collections.abc import Sequence

from argosy.record.console import amount

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 200, 56, 10, 10, 24


def line_chart(title: str, curves: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> str:
    """(label, steps, values) for each curve; one of few points is drawn as dots."""
    points = [(x, y) for _, xs, ys in curves for x, y in zip(xs, ys, strict=True)]
    if not points:
        return ""
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    if y0 == y1:
        y0, y1 = y0 - (abs(y0) * 0.05 or 1), y1 + (abs(y1) * 0.05 or 1)

    def across(x: float) -> float:
        return _LEFT + (x - x0) / ((x1 - x0) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _TOP + (y1 - y) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        parts.append(
            f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(value):.1f}" y2="{down(value):.1f}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{_label(value, y1 - y0)}</text>'
        )
    for i in range(5):
        step = x0 + (x1 - x0) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(
            f'<text x="{across(step):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{amount(round(step))}</text>'
        )
    for number, (_, xs, ys) in enumerate(curves):
        placed = [(across(x), down(y)) for x, y in zip(xs, ys, strict=True)]
        if len(placed) < 40 and number:
            parts += [f'<circle class="f{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in placed]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline class="c{number % 4}" points="{line}"/>')
    legend = "".join(f'<span class="f{i % 4}">{html.escape(label)}</span>' for i, (label, _, _) in enumerate(curves))
    keys = f'<p class="legend">{legend}</p>' if len(curves) > 1 else ""
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    )
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{picture}{keys}</figure>"


def _label(value: float, span: float) -> str:
    if abs(value) >= 1e4:
        return amount(value)
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.{2 if span >= 0.1 else 4}f}"

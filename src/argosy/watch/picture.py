"""Curves as SVG, drawn in Python so that a report needs no script and prints well."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.console.formats import amount

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 200, 56, 10, 10, 24
_TICKS = 5


@dataclass(frozen=True)
class Curve:
    """A curve in pieces: the mean, lowest and highest value of each."""

    label: str
    steps: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class _Frame:
    """The mapping of steps and values to coordinates of the picture."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.x0, self.x1 = min(min(c.steps) for c in curves), max(max(c.steps) for c in curves)
        self.y0, self.y1 = min(min(c.low) for c in curves), max(max(c.high) for c in curves)
        if self.y0 == self.y1:
            aside = abs(self.y0) * 0.05 or 1
            self.y0, self.y1 = self.y0 - aside, self.y1 + aside

    def across(self, step: float) -> float:
        return _LEFT + (step - self.x0) / ((self.x1 - self.x0) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        return _TOP + (self.y1 - value) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM)

    def points(self, steps: Sequence[float], values: Sequence[float]) -> str:
        return " ".join(f"{self.across(x):.1f},{self.down(y):.1f}" for x, y in zip(steps, values, strict=True))


def line_chart(title: str, curves: Sequence[Curve]) -> str:
    """Draw all curves on the same axes. A second curve of few points is drawn as dots."""
    curves = [curve for curve in curves if curve.steps]
    if not curves:
        return ""
    frame = _Frame(curves)
    drawn = "".join(_drawn(curve, number, frame) for number, curve in enumerate(curves))
    legend = "".join(f'<span class="f{i % 4}">{html.escape(curve.label)}</span>' for i, curve in enumerate(curves))
    keys = f'<p class="legend">{legend}</p>' if len(curves) > 1 else ""
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">{_axes(frame)}{drawn}</svg>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{picture}{keys}</figure>"


def _axes(frame: _Frame) -> str:
    parts = []
    for value in _ticks(frame.y0, frame.y1):
        y = frame.down(value)
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(value)}</text>')
    for step in _ticks(frame.x0, frame.x1):
        x = frame.across(step)
        anchor = "start" if x < _LEFT + 10 else "end" if x > _WIDTH - _RIGHT - 10 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{amount(round(step))}</text>')
    return "".join(parts)


def _drawn(curve: Curve, number: int, frame: _Frame) -> str:
    colour = number % 4
    if len(curve.steps) < 40 and number:
        places = [(frame.across(x), frame.down(y)) for x, y in zip(curve.steps, curve.mean, strict=True)]
        return "".join(f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places)
    line = f'<polyline class="c{colour}" points="{frame.points(curve.steps, curve.mean)}"/>'
    if list(curve.low) == list(curve.high):
        return line
    edge = frame.points(curve.steps, curve.high), frame.points(curve.steps[::-1], curve.low[::-1])
    return f'<polygon class="b{colour}" points="{" ".join(edge)}"/>{line}'


def _ticks(low: float, high: float) -> list[float]:
    """Return round values between the two, at least one."""
    span = high - low or 1.0
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    step = next(part * power for part in (1, 2, 5, 10) if span / (part * power) <= _TICKS)
    found = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return found or [low]


def _label(value: float) -> str:
    return amount(value) if abs(value) >= 1e4 else f"{value:.4g}"

"""Curves in a terminal, drawn with braille dots: two across and four down in each character cell."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.console.formats import amount

Points = Sequence[tuple[float, float]]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row] bits of a braille cell


def plot(
    points: Points, *, marks: Points = (), width: int = 64, height: int = 12, y_label: str = "", x_label: str = ""
) -> str:
    """Draw a line through `points`, with `marks` as ● on top. Points must be finite and in x order."""
    everything = [*points, *marks]
    if not everything:
        return "(nothing to plot)"
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
    y_low, y_high = min(y for _, y in everything), max(y for _, y in everything)
    x_scale = (2 * width - 1) / (x_high - x_low or 1)
    y_scale = (4 * height - 1) / (y_high - y_low or 1)

    cells = [[0] * width for _ in range(height)]
    previous: tuple[int, int] | None = None
    for x, y in points:
        column, row = round((x - x_low) * x_scale), round((y_high - y) * y_scale)
        for c, r in _between(previous or (column, row), (column, row)):
            cells[r // 4][c // 2] |= _DOTS[c % 2][r % 4]
        previous = (column, row)
    text = [[chr(0x2800 + cell) if cell else " " for cell in line] for line in cells]
    for x, y in marks:
        text[round((y_high - y) * y_scale) // 4][round((x - x_low) * x_scale) // 2] = "●"

    labels = {0: _label(y_high), height - 1: _label(y_low)}
    margin = max(len(label) for label in labels.values())
    lines = [f"{labels.get(i, ''):>{margin}} ┤{''.join(line)}" for i, line in enumerate(text)]
    left, right = f"{x_low:g}", f"{x_high:g} {x_label}".rstrip()
    lines.append(" " * margin + " └" + "─" * width)
    lines.append(" " * (margin + 2) + left + right.rjust(width - len(left)))
    return "\n".join(([" " * (margin + 2) + y_label] if y_label else []) + lines)


def _label(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e4 else f"{value:.3g}" if abs(value) >= 1e15 else amount(value)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (start[0] + round((end[0] - start[0]) * i / steps), start[1] + round((end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]

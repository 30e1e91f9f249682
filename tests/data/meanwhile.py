"""A hook that runs while `prepare` reads an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from argosy.data.text.blocks import Piece
from argosy.data.text.records import Parser


def when_reading(monkeypatch: pytest.MonkeyPatch, change: Callable[[Piece], object]) -> None:
    """Call `change` with the first records that are read, before they are parsed."""
    parse, done = Parser.parse, []

    def and_change(self: Parser, piece: Piece) -> Any:
        if not done:
            done.append(piece)
            change(piece)
        return parse(self, piece)

    monkeypatch.setattr(Parser, "parse", and_change)

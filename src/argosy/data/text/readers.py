"""Which reader an input needs, by the kind of its file: blocks of lines, of rows or of files, and what parses them."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.data.text.blocks import Blocks, FileBlocks, LineBlocks
from argosy.data.text.inputs import InputFile
from argosy.data.text.records import Parser
from argosy.data.text.tables import TableBlocks


def open_blocks(
    group: Sequence[InputFile], *, keys: Sequence[str], block_bytes: int, text_lines: bool
) -> tuple[Blocks, Parser]:
    """`group` is one file, or several small text files that are one document each. Plain text has no keys."""
    first = group[0]
    if first.is_table:
        return TableBlocks(first, block_bytes, keys), Parser(keys)
    if not first.is_text:
        return LineBlocks(first, block_bytes), Parser(keys)
    return LineBlocks(first, block_bytes) if text_lines else FileBlocks(group), Parser(None)

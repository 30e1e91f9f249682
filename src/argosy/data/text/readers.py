"""Choose the block reader and the record parser of an input by its file type: lines, table rows or whole text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.data.text.blocks import Blocks, FileBlocks, LineBlocks, Piece
from argosy.data.text.input_files import check_unchanged, reading
from argosy.data.text.inputs import InputFile
from argosy.data.text.records import Parser, texts_of
from argosy.data.text.tables import TableBlocks
from argosy.errors import ArgosyError


def open_blocks(
    group: Sequence[InputFile], *, keys: Sequence[str], block_bytes: int, text_lines: bool
) -> tuple[Blocks, Parser]:
    """Open an input with documents of text.

    Args:
        group: One file, or several small text files that are one document each.
        keys: The keys or columns that hold the text. They do not apply to plain text.
        block_bytes: The size of a block.
        text_lines: Take each line of a text file as a document, instead of the whole file.
    """
    first = group[0]
    with reading(group):
        if first.is_table:
            return TableBlocks(first, block_bytes, keys), Parser(keys)
        if not first.is_text:
            return LineBlocks(first, block_bytes), Parser(keys)
        return LineBlocks(first, block_bytes) if text_lines else FileBlocks(group), Parser(None)


def open_records(group: Sequence[InputFile], *, keys: Sequence[str], block_bytes: int) -> Blocks:
    """Open an input whose records are objects, such as conversations. `keys` are the columns to read of a table, if it has them."""
    first = group[0]
    if first.is_text:
        raise ArgosyError(
            "data.bad-input",
            f"{first.path} is plain text, and has no conversations",
            fix="give .jsonl or .parquet files",
        )
    with reading(group):
        if first.is_table:
            return TableBlocks(first, block_bytes, keys, if_there=True)
        return LineBlocks(first, block_bytes)


def read_block(blocks: Blocks, index: int, group: Sequence[InputFile]) -> Iterator[Piece] | None:
    """Return the pieces of a block, or None past the end. Unreadable content raises `data.bad-input` with the file's name."""
    where = f", block {index}"
    with reading(group, where):
        pieces = blocks.block(index)
    return None if pieces is None else _guarded(pieces, group, where)


def _guarded(pieces: Iterator[Piece], group: Sequence[InputFile], where: str) -> Iterator[Piece]:
    with reading(group, where):
        yield from pieces


def all_texts(groups: Sequence[Sequence[InputFile]], keys: Sequence[str]) -> Iterator[str]:
    """Yield the good texts of all inputs. Refuse an input that changes while it is read."""
    for group in groups:
        blocks, parser = open_blocks(group, keys=keys, block_bytes=1 << 24, text_lines=False)
        index = 0
        while (pieces := read_block(blocks, index, group)) is not None:
            yield from texts_of(pieces, parser)
            index += 1
        check_unchanged(group)

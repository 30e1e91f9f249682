"""Compare an input with a part that was made of it, by the CRC-32 of what the part read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from argosy.data.text.blocks import Blocks
from argosy.data.text.input_files import input_changed
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import read_block
from argosy.errors import ArgosyError


def compare_part(
    facts: Path, block: int, open_group: Callable[[], Blocks], group: Sequence[InputFile]
) -> dict[str, Any] | None:
    """Read a block again, and compare it with what its finished part was made of.

    Args:
        facts: The `.json` of the part. Without it the part is not finished, and nothing is compared.
        block: The number of the block.
        open_group: A function that opens the inputs.
        group: The inputs.

    Returns:
        None if they are the same, else the `data.input-changed` error that names the file, as a dictionary. It is not raised, so that the
        workers remain usable for a job that starts over.
    """
    stored = _stored_checksums(facts)
    if stored is None:
        return None
    since = f"after parts of {facts.parent.parent} had been made from it"
    try:
        now = _checksums(open_group(), block, group)
    except ArgosyError as error:
        if error.code != "data.bad-input":
            raise
        # It could be read when the part was made.
        return input_changed(group[0], error.cause, since=since).as_dict()
    for file in group:
        before, after = (f"CRC-32 {found[file.path]:08x}" if file.path in found else "none" for found in (stored, now))
        if before != after:
            what = f"content of block {block} {before} -> {after}, with the same size and time"
            return input_changed(file, what, since=since).as_dict()
    return None


def _stored_checksums(facts: Path) -> dict[str, int] | None:
    """Return the CRC-32 of each file that a part read, or None if the part is not finished."""
    try:
        files: Any = orjson.loads(facts.read_bytes())["files"]
        # Parts of `prepare` keep a dictionary, those of `curate` a list. The checksum is last in both.
        rows = [(name, *counts) for name, counts in files.items()] if isinstance(files, dict) else files
        return {str(row[0]): int(row[3]) for row in rows}
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _checksums(blocks: Blocks, block: int, group: Sequence[InputFile]) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in read_block(blocks, block, group) or ():
        found[piece.file] = zlib.crc32(piece.content, found.get(piece.file, 0))
    return found

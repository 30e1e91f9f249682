"""A sample of the corpus, from the start of its first inputs, to check a tokenizer engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import open_blocks, read_block
from argosy.data.text.records import texts_of


class TextKeys(Protocol):
    """Where the texts of a record are."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def text_lines(self) -> bool: ...


# Small, because the reference tokenizer is slow.
SAMPLE_BYTES = 200_000
_GROUPS = 3


def sample_texts(groups: list[list[InputFile]], options: TextKeys) -> list[str]:
    """Return about SAMPLE_BYTES of text from the first inputs."""
    texts: list[str] = []
    size = 0
    for text in _first_texts(groups, options):
        texts.append(text[: SAMPLE_BYTES // 10])
        size += len(texts[-1])
        if size > SAMPLE_BYTES:
            break
    return texts


def _first_texts(groups: list[list[InputFile]], options: TextKeys) -> Iterator[str]:
    for group in groups[:_GROUPS]:
        blocks, parser = open_blocks(group, keys=options.keys, block_bytes=1 << 16, text_lines=options.text_lines)
        yield from texts_of(read_block(blocks, 0, group) or iter(()), parser)

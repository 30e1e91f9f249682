"""Remove documents that share n-grams of words with evaluation sets.

The words are folded (lower case, no accents, no punctuation, 0 for digits), as for near-duplicates. Evaluation sets are local files:
every string of a JSON record counts, whatever its key, so questions, answers and choices are all protected.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import Hashes, mix
from argosy.data.text.blocks import FileBlocks, LineBlocks
from argosy.data.text.input_files import check_unchanged
from argosy.data.text.inputs import InputFile, find_inputs
from argosy.data.text.readers import read_block
from argosy.errors import ArgosyError

_SCREEN_BITS = 22


class Step(CurationStep):
    """Remove documents that have an n-gram of an evaluation set."""

    against: tuple[str, ...] = Field(min_length=1)
    n: int = Field(default=12, ge=2)
    # How many n-grams of a document must be in an evaluation set.
    min_matches: int = Field(default=1, ge=1)

    def files(self) -> tuple[str, ...]:
        return self.against

    def check(self) -> None:
        _index(self.against, self.n)

    def apply(self, batch: TextBatch) -> StepResult:
        index, screen = _index(self.against, self.n)
        words = batch.folded_words
        starts = words.gram_starts(self.n, batch.alive)
        grams = mix(words.grams(self.n, starts))
        # Nearly all n-grams are ruled out by one look into a table of bits.
        possible = np.flatnonzero(screen[grams >> np.uint64(64 - _SCREEN_BITS)])
        found = possible[np.isin(grams[possible], index)]
        matches = np.bincount(words.document_of[starts[found]], minlength=len(batch.texts))
        return StepResult({int(number): "overlap" for number in np.flatnonzero(matches >= self.min_matches)})


@lru_cache(maxsize=8)
def _index(against: tuple[str, ...], n: int) -> tuple[Hashes, npt.NDArray[np.bool_]]:
    """Return the sorted hashes of the n-grams of all evaluation sets, and a table of their highest bits."""
    found: list[Hashes] = []
    # An evaluation set that is named twice removes nothing more.
    for file in find_inputs(against, may_repeat=True):
        if file.is_table:
            raise ArgosyError(
                "data.bad-input",
                f"{file.path}: evaluation sets are read from .jsonl or .txt files",
                key="against",
                value=file.path,
                fix="write the set as JSONL",
            )
        batch = TextBatch(list(_strings(file)))
        words = batch.folded_words
        found.append(mix(words.grams(n, words.gram_starts(n, batch.alive))))
    hashes = np.unique(np.concatenate(found))
    screen = np.zeros(1 << _SCREEN_BITS, np.bool_)
    screen[hashes >> np.uint64(64 - _SCREEN_BITS)] = True
    return hashes, screen


def _strings(file: InputFile) -> Iterator[str]:
    blocks = FileBlocks([file]) if file.is_text else LineBlocks(file, max(1, file.size) * 1000)
    for piece in read_block(blocks, 0, [file]) or ():
        for record in piece.records:
            if not isinstance(record, bytes) or not record.strip():
                continue
            if file.is_text:
                yield record.decode("utf-8", errors="replace")
                continue
            try:
                yield from _inside(orjson.loads(record))
            except orjson.JSONDecodeError as error:
                raise ArgosyError("data.bad-input", f"{file.path}: {error}", fix="repair the record") from None
    check_unchanged([file])


def _inside(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inside(part)

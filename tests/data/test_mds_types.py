"""The dtype of an MDS column of plain bytes: a wrong one is refused, and real ids are never refused in their own dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from argosy.data.corpus.mds_types import check_type
from argosy.errors import ArgosyError

RANDOM = np.random.default_rng(7)
WIDTHS = {"uint16": 2, "int32": 4, "int64": 8}


def ids(most: int, size: int = 500, samples: int = 20) -> list[np.ndarray]:
    return [RANDOM.integers(0, most, size) for _ in range(samples)]


def ending(documents: list[np.ndarray], mark: int, times: int = 1) -> list[np.ndarray]:
    return [np.concatenate([document[:-times], [mark] * times]) for document in documents]


def alternating(other: int) -> list[np.ndarray]:
    return [np.stack([document[:250], np.full(250, other)], 1).ravel() for document in ids(50_000)]


CASES = {
    "one -100 in each": ending(ids(50_000), -100),
    "padded with -1": ending(ids(50_000), -1, 100),
    "one -1 in all": [*ending(ids(50_000, samples=1), -1), *ids(50_000)],
    "20 ids": ids(50_000, 20, 1),
    "zero and one": ids(2),
    "six letters": ids(6),
    "a vocabulary past 16 bits": ids(152_000),
    "mostly above 65,535": [np.where(RANDOM.random(500) < 0.75, d + 70_000, d) for d in ids(60_000)],
    "alternating with 3": alternating(3),
    "added tokens only": [document + 131_072 for document in ids(4096)],
    "mostly zero": [np.where(RANDOM.random(500) < 0.99, 0, document) for document in ids(50_000)],
}
# Pairs of types that no rule tells apart without refusing real ids.
UNDECIDED = {
    ("alternating with 3", "uint16", "int32"),
    ("added tokens only", "int32", "uint16"),
}


def check(documents: list[np.ndarray], written: str, asked: str) -> None:
    values = [memoryview(document.astype(written).tobytes()) for document in documents]
    check_type(Path("shard.mds"), values, np.dtype(asked), None, "tokens")


def fits(documents: list[np.ndarray], dtype: str) -> bool:
    info = np.iinfo(dtype)
    return all(document.min() >= info.min and document.max() <= info.max for document in documents)


@pytest.mark.parametrize("written", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_ids_are_accepted_in_their_own_dtype_and_refused_in_another(name: str, written: str) -> None:
    documents = CASES[name]
    if not fits(documents, written):
        return
    check(documents, written, written)
    for asked in WIDTHS.keys() - {written}:
        if (name, written, asked) in UNDECIDED:
            check(documents, written, asked)
            continue
        with pytest.raises(ArgosyError) as refusal:
            check(documents, written, asked)
        assert (refusal.value.code, refusal.value.key) == ("data.bad-mds", "--bytes-dtype"), asked

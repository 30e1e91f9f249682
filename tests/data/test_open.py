"""Opening a run's data refuses what would otherwise fail, or worse not fail, after hours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from argosy.config.resolve import resolve
from argosy.data.indexed import IndexedWriter, dtype_for
from argosy.data.open import open_data
from argosy.data.tokenizer import train_bpe
from argosy.errors import ArgosyError

Write = Callable[..., Path]


def refusal(path: Path, *overrides: str) -> ArgosyError:
    with pytest.raises(ArgosyError) as caught:
        open_data(resolve(path, overrides).spec)
    return caught.value


def test_the_tokenizer_stored_with_the_data_is_used(write_spec: Write) -> None:
    data = open_data(resolve(write_spec()).spec)
    assert data.tokenizer is not None
    assert data.tokenizer.fingerprint == "bytes-v1"


def test_another_tokenizer_than_the_datas_is_refused(write_spec: Write, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(train_bpe(["other words"] * 9, 260))
    error = refusal(write_spec(), f"data.tokenizer={tmp_path / 'other.json'}", "model.vocab_size=300")
    assert (error.code, error.key) == ("tokenizer.mismatch", "data.tokenizer")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(write_spec: Write) -> None:
    error = refusal(write_spec(), "model.vocab_size=256")
    assert (error.code, error.fix) == ("tokenizer.vocabulary", "model.vocab_size=257")


def test_a_token_beyond_the_vocabulary_of_a_bare_pair_is_found_by_looking(write_spec: Write, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", dtype_for(1000))
    for _ in range(20):
        writer.add_document([np.arange(0, 100)])
    writer.add_document([np.array([257])])
    writer.finish()
    error = refusal(write_spec(), f"data.train={tmp_path / 'pair'}")
    assert error.code == "tokenizer.vocabulary"
    assert "257" in error.cause
    data = open_data(resolve(write_spec(), [f"data.train={tmp_path / 'pair'}", "model.vocab_size=258"]).spec)
    assert data.tokenizer is None


def test_missing_data_is_refused(write_spec: Write, tmp_path: Path) -> None:
    assert refusal(write_spec(), f"data.train={tmp_path / 'no' / 'where'}").code == "data.not-found"
    assert refusal(write_spec(), f"data.train={tmp_path / 'nowhere'}").code == "data.not-found"

"""`data.order: megatron` trains on the very samples Megatron-core would, blends and shards included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from argosy.config.resolve import resolve
from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, dtype_for
from argosy.data.open import open_data
from argosy.data.samples.megatron_stream import MegatronStream
from argosy.data.samples.windows import BatchMaker
from argosy.errors import ArgosyError
from argosy.train.run import TrainOptions, train


class Tokenizer:
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012
    pad, eod, vocab_size = 0, 0, 500


def write(prefix: Path, seed: int, documents: int = 60) -> IndexedReader:
    rng = np.random.default_rng(seed)
    writer = IndexedWriter(prefix, dtype_for(500))
    for length in rng.integers(1, 90, documents):
        writer.add_document([rng.integers(1, 500, length)])
    writer.finish()
    return IndexedReader(prefix)


def megatron(prefixes: list[Path], weights: list[float] | None, size: int, seed: int) -> list[np.ndarray]:
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=32, blend=([str(p) for p in prefixes], weights), split="90,10,0",
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    built = BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()[0]
    return [np.append(built[i]["tokens"].numpy(), built[i]["labels"].numpy()[-1]) for i in range(size)]


@pytest.mark.parametrize("weights", [None, [0.3, 0.7], [5.0, 1.0]])
@pytest.mark.parametrize("size", [20, 150])
def test_samples_equal_megatrons(tmp_path: Path, weights: list[float] | None, size: int) -> None:
    prefixes = [tmp_path / "a", tmp_path / "b"] if weights else [tmp_path / "a"]
    corpora = [Corpus(p, [write(p, i)], None) for i, p in enumerate(prefixes)]
    stream = MegatronStream(corpora, (90, 10, 0), weights, seq_len=32, num_samples=size, seed=7, maker=BatchMaker(500))
    ours = stream.batch(0, size)
    rows = np.concatenate([ours.tokens, ours.labels[:, -1:]], axis=1)
    assert np.array_equal(rows, np.stack(megatron(prefixes, weights, size, 7)))


def test_shards_read_as_the_merged_pair_would(tmp_path: Path) -> None:
    parts = [write(tmp_path / name, i, 30) for i, name in enumerate("ab")]
    writer = IndexedWriter(tmp_path / "merged", dtype_for(500))
    for part in parts:
        writer.add_pair(part)
    writer.finish()
    merged = Corpus(tmp_path, [IndexedReader(tmp_path / "merged")], None)
    options = {"seq_len": 32, "num_samples": 90, "seed": 3, "maker": BatchMaker(500)}
    whole = MegatronStream([merged], (90, 10, 0), None, **options).batch(0, 90)
    sharded = MegatronStream([Corpus(tmp_path, parts, None)], (90, 10, 0), None, **options).batch(0, 90)
    assert np.array_equal(whole.tokens, sharded.tokens)


def test_a_run_trains_in_this_order_and_cannot_change_its_length(
    write_spec: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    path = write_spec(
        data={
            "train": str(corpus),
            "seq_len": 32,
            "split": [90, 10, 0],
            "order": "megatron",
            "order_cache": str(tmp_path / "cache"),
        }
    )
    spec = resolve(path).spec
    default, exact = (
        open_data(spec.model_copy(update={"data": spec.data.model_copy(update={"order": "argosy"})})),
        open_data(spec),
    )
    assert not np.array_equal(default.training().batch(0, 8).tokens, exact.training().batch(0, 8).tokens)
    assert train(resolve(path), path, TrainOptions(quiet=True)) == 0
    assert list((tmp_path / "cache").iterdir())
    with pytest.raises(ArgosyError) as refusal:
        train(resolve(path, ["train.steps=9"]), path, TrainOptions(quiet=True))
    assert (refusal.value.code, refusal.value.key) == ("run.changed", "train.steps")


def test_an_order_that_cannot_be_kept_is_said_and_is_right_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    corpus = Corpus(tmp_path, [write(tmp_path / "a", 0)], None)
    options = {"seq_len": 32, "num_samples": 40, "seed": 3, "maker": BatchMaker(500)}
    kept_nowhere = MegatronStream([corpus], (90, 10, 0), None, **options, cache_dir=tmp_path / "file" / "cache")
    assert "could not be kept" in capsys.readouterr().err
    plain = MegatronStream([corpus], (90, 10, 0), None, **options)
    assert np.array_equal(kept_nowhere.batch(0, 40).tokens, plain.batch(0, 40).tokens)

"""`data.order: megatron` trains on exactly the samples of Megatron-core, including blends and shards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_blending import megatron_blends_as_on_x86

from argosy.config.resolve import resolve
from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, dtype_for
from argosy.data.open import open_data
from argosy.data.samples.megatron_stream import MegatronStream
from argosy.data.samples.windows import BatchMaker
from argosy.errors import ArgosyError
from argosy.measure.dry_run import dry_run
from argosy.train.run import TrainOptions, train

# A fixture for all tests here.
__all__ = ["megatron_blends_as_on_x86"]


class Tokenizer:
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012
    pad, eod, vocab_size = 0, 0, 500


def write(prefix: Path, seed: int, documents: int = 60, sequences: int = 1) -> IndexedReader:
    """Write documents of up to `sequences` sequences."""
    rng = np.random.default_rng(seed)
    writer = IndexedWriter(prefix, dtype_for(500))
    for length in rng.integers(1, 90, documents):
        parts = 1 if sequences == 1 else int(rng.integers(1, sequences + 1))
        writer.add_document([rng.integers(1, 500, length) for _ in range(parts)])
    writer.finish()
    return IndexedReader(prefix)


def megatron(
    prefixes: list[Path], weights: list[float] | None, size: int | None, seed: int, split: int = 0
) -> list[np.ndarray]:
    """Build Megatron's samples of a split; without a size, one epoch."""
    sizes: list[int | None] = [0, 0, 0]
    sizes[split] = size
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=32, blend=([str(p) for p in prefixes], weights), split="90,10,0",
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[split]
    items = [built[i] for i in range(len(built) if size is None else size)]
    return [np.append(item["tokens"].numpy(), item["labels"].numpy()[-1]) for item in items]


@pytest.mark.parametrize("weights", [None, [0.3, 0.7], [5.0, 1.0]])
@pytest.mark.parametrize("size", [20, 150])
def test_samples_equal_megatrons(tmp_path: Path, weights: list[float] | None, size: int) -> None:
    prefixes = [tmp_path / "a", tmp_path / "b"] if weights else [tmp_path / "a"]
    corpora = [Corpus(p, [write(p, i)], None) for i, p in enumerate(prefixes)]
    stream = MegatronStream(corpora, (90, 10, 0), weights, seq_len=32, num_samples=size, seed=7, maker=BatchMaker(500))
    ours = stream.batch(0, size)
    rows = np.concatenate([ours.tokens, ours.labels[:, -1:]], axis=1)
    assert np.array_equal(rows, np.stack(megatron(prefixes, weights, size, 7)))


@pytest.mark.parametrize("weights", [[0.3, 0.7], None])
def test_samples_past_the_end_are_those_of_the_beginning(tmp_path: Path, weights: list[float] | None) -> None:
    """A run that was rewound skips samples, and needs as many more than Megatron built."""
    prefixes = [tmp_path / "a", tmp_path / "b"] if weights else [tmp_path / "a"]
    corpora = [Corpus(p, [write(p, i)], None) for i, p in enumerate(prefixes)]
    stream = MegatronStream(corpora, (90, 10, 0), weights, seq_len=32, num_samples=20, seed=7, maker=BatchMaker(500))
    end = len(stream)
    past, first = stream.batch(end - 1, 3).tokens, stream.batch(0, 2).tokens
    assert np.array_equal(past[1:], first)


@pytest.mark.parametrize("sequences", [1, 4])
def test_an_evaluation_reads_megatrons_validation_samples(tmp_path: Path, sequences: int) -> None:
    """One epoch of the validation split, of one source alone and of all sources blended."""
    prefixes = [tmp_path / "a", tmp_path / "b"]
    corpora = [Corpus(p, [write(p, i, sequences=sequences)], None) for i, p in enumerate(prefixes)]
    for chosen in ([0], [1], [0, 1]):
        stream = MegatronStream(
            [corpora[i] for i in chosen],
            (90, 10, 0),
            None,
            seq_len=32,
            num_samples=None,
            seed=7,
            maker=BatchMaker(500),
            split="validation",
        )
        ours = stream.batch(0, stream.epoch_samples)
        rows = np.concatenate([ours.tokens, ours.labels[:, -1:]], axis=1)
        assert np.array_equal(rows, np.stack(megatron([prefixes[i] for i in chosen], None, None, 7, split=1)))


BLENDS = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=8, max_size=30), st.floats(0.05, 5)), min_size=1, max_size=3
)


@settings(max_examples=40, deadline=None)
@given(BLENDS, st.booleans(), st.integers(1, 9), st.integers(1, 40), st.integers(2, 12))
# Longer than an epoch, without weights.
@example([([5] * 8, 1.0), ([7] * 8, 1.0)], False, 4, 40, 4)
def test_every_sample_of_a_run_can_be_read_or_it_is_refused_at_the_start(
    sets: list[tuple[list[int], float]], weighted: bool, batch: int, steps: int, seq_len: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        corpora = []
        for number, (lengths, _) in enumerate(sets):
            prefix = Path(directory) / f"set{number}"
            writer = IndexedWriter(prefix, dtype_for(500))
            for length in lengths:
                writer.add_document([np.arange(1, length + 1)])
            writer.finish()
            corpora.append(Corpus(prefix, [IndexedReader(prefix)], None))
        weights = [weight for _, weight in sets] if weighted else None
        options = {"seq_len": seq_len, "num_samples": batch * steps, "seed": 3, "maker": BatchMaker(500)}
        epoch = [(sum(lengths[: round(len(lengths) * 0.9)]) - 1) // seq_len for lengths, _ in sets]
        if not weighted and len(sets) > 1 and (batch * steps > sum(epoch) or min(epoch) < 1):
            with pytest.raises(ArgosyError):
                MegatronStream(corpora, (90, 10, 0), weights, **options)
            return
        try:
            stream = MegatronStream(corpora, (90, 10, 0), weights, **options)
        except ArgosyError:
            # Megatron's margin can be too small for a blend of few samples. We refuse such a blend as Megatron does.
            assert weighted
            return
        for step in range(steps):
            assert stream.batch(step * batch, batch).tokens.shape == (batch, seq_len)


def test_a_blend_shorter_than_the_run_is_refused_by_a_dry_run_with_its_numbers(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    for number, name in enumerate("ab"):
        write(tmp_path / name, number)
    sources = [{"path": str(tmp_path / name)} for name in "ab"]
    data = {"train": sources, "seq_len": 32, "split": [90, 10, 0], "order": "megatron"}
    path = write_spec(data=data, train={"global_batch": 8, "steps": 50})
    with pytest.raises(ArgosyError) as refusal:
        dry_run(resolve(path, ["model.vocab_size=500"]), TrainOptions())
    counts = [(sum(IndexedReader(tmp_path / name).lengths[:54].tolist()) - 1) // 32 for name in "ab"]
    assert refusal.value.key == "data.train"
    assert (
        f"takes 400 samples; without weights Megatron's blend gives every sample once: {counts[0]} + {counts[1]} = "
        in (refusal.value.cause)
    )
    weights = [{**source, "weight": count} for source, count in zip(sources, counts, strict=True)]
    path = write_spec(data={**data, "train": weights}, train={"global_batch": 8, "steps": 50})
    assert dry_run(resolve(path, ["model.vocab_size=500"]), TrainOptions())


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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="argosy")
    (tmp_path / "file").touch()
    corpus = Corpus(tmp_path, [write(tmp_path / "a", 0)], None)
    options = {"seq_len": 32, "num_samples": 40, "seed": 3, "maker": BatchMaker(500)}
    kept_nowhere = MegatronStream([corpus], (90, 10, 0), None, **options, cache_dir=tmp_path / "file" / "cache")
    assert "could not be cached" in caplog.text
    plain = MegatronStream([corpus], (90, 10, 0), None, **options)
    assert np.array_equal(kept_nowhere.batch(0, 40).tokens, plain.batch(0, 40).tokens)

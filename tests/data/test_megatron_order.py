"""`order: megatron` gives the samples of megatron-core's own GPTDataset and BlendedDataset, one by one.

Every token of these corpora is different, so two samples with equal tokens come from the same place.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron_blending import TIES, blending_indices, exhaustive_blending_indices, megatron_blends_as_on_x86

from argosy.data.corpus.indexed import CODES, HEADER, MAGIC, IndexedReader, IndexedWriter, dtype_for, idx_path
from argosy.data.samples.megatron_blend import MegatronBlend, plan_blend
from argosy.data.samples.megatron_order import MegatronSamples, split_ranges
from argosy.errors import ArgosyError

# A fixture for all tests here.
__all__ = ["megatron_blends_as_on_x86"]
SEEDS = st.integers(0, 2**32 - 1)
SEQ_LENS = st.integers(2, 20)
SPLITS = st.sampled_from(["98,2,0", "70,20,10", "100,0,0", "969,30,1", "1,1,1", "33.3,33.3,33.3"])
WEIGHTS = st.lists(st.floats(-3, 3).map(lambda power: 10**power), min_size=1, max_size=9)


class NoTokenizer:
    """The attributes of a tokenizer that GPTDataset needs, with ids that no corpus here holds."""

    vocab_size = None
    eod = eos = -2
    pad = -1
    unique_identifiers: ClassVar[dict[str, str]] = {}


def write(prefix: Path, lengths: Sequence[int], first: int = 0) -> IndexedReader:
    """Write one sequence of each length, with tokens counted up from `first`.

    The writer leaves empty sequences out, so the index of a corpus that has any is written here, as older tools did.
    """
    writer = IndexedWriter(prefix, dtype_for(10**6))
    for length in lengths:
        writer.add_document([np.arange(first, first + length)])
        first += length
    writer.finish()
    if 0 in lengths:
        counts = np.array(lengths, "<i4")
        pointers = (np.cumsum(counts, dtype="<i8") - counts) * 4
        header = HEADER.pack(MAGIC, 1, CODES[np.dtype("<i4")], len(lengths), len(lengths) + 1)
        bounds = np.arange(len(lengths) + 1, dtype="<i8")
        idx_path(prefix).write_bytes(header + counts.tobytes() + pointers.tobytes() + bounds.tobytes())
    return IndexedReader(prefix)


def config(seq_len: int, seed: int, blend: Any, split: str, extra_token: bool = True) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=blend,
        split=split,
        tokenizer=NoTokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=extra_token,
    )


def gpt_dataset(prefix: Path, settings: GPTDatasetConfig, split: Split, num_samples: int | None) -> GPTDataset:
    """Build one split as Megatron's builder does. Another split that is empty would make the builder hang or abort."""
    low_level = GPTDataset.build_low_level_dataset(str(prefix), settings)
    share = settings.split_matrix[split.value] or (0.0, 0.0)
    first, last = (round(bound * float(GPTDataset.numel_low_level_dataset(low_level))) for bound in share)
    numbers = np.arange(first, last, dtype=np.int32)
    return GPTDataset(low_level, str(prefix), numbers, num_samples, split, settings)


def read(reader: IndexedReader, first: int, samples: MegatronSamples, index: int) -> list[int]:
    """Read the tokens of a sample by its pieces. The split begins at sequence `first`."""
    pieces = samples.pieces(index)
    assert all(count > 0 for _, _, count in pieces)
    return [int(t) for number, at, count in pieces for t in reader.sequence(first + number)[at : at + count]]


def expected(item: dict[str, Any]) -> list[int]:
    return [*item["tokens"].tolist(), int(item["labels"][-1])]


LENGTHS = st.one_of(
    st.lists(st.integers(1, 30), min_size=1, max_size=80),
    st.lists(st.sampled_from([0, 0, 1, 2, 300]), min_size=1, max_size=120),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LENGTHS, SEQ_LENS, SEEDS, SPLITS, st.sampled_from(list(Split)), st.floats(0, 6) | st.none(), st.booleans())
# One document is longer than many samples.
@example([300], 8, 1, "100,0,0", Split.train, None, True)
# Each sample holds many documents.
@example([1] * 50, 7, 1, "100,0,0", Split.train, 2.5, True)
@example([0, 0, 5, 0, 3, 0], 4, 1, "100,0,0", Split.train, 3.0, True)
# One sample takes several epochs.
@example([3], 20, 1, "100,0,0", Split.train, 4.0, True)
# Every cut falls between two documents.
@example([4] * 10, 4, 1, "100,0,0", Split.train, 1.5, False)
def test_samples_are_those_of_gpt_dataset(
    lengths: list[int], seq_len: int, seed: int, shares: str, split: Split, epochs: float | None, extra: bool
) -> None:
    first, last = split_ranges([float(s) for s in shares.split(",")], len(lengths))[split.value]
    tokens = sum(lengths[first:last])
    # Megatron hangs or aborts.
    assume(tokens > 1)
    num_samples = None if epochs is None else math.ceil(epochs * tokens / seq_len)
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        reader = write(prefix, lengths)
        theirs = gpt_dataset(prefix, config(seq_len, seed, ([str(prefix)], None), shares, extra), split, num_samples)
        mine = reader.lengths[first:last]
        if num_samples is None and len(theirs) == 0:
            with pytest.raises(ArgosyError):
                MegatronSamples(mine, seq_len=seq_len, num_samples=None, seed=seed, extra_token=extra)
            return
        ours = MegatronSamples(mine, seq_len=seq_len, num_samples=num_samples, seed=seed, extra_token=extra)
        assert len(ours) == len(theirs)
        for index in range(len(ours)):
            item = theirs[index]
            assert read(reader, first, ours, index) == (expected(item) if extra else item["tokens"].tolist())


@pytest.mark.parametrize("num_samples", [None, 40_000])
def test_a_corpus_of_many_blocks_of_documents(tmp_path: Path, num_samples: int | None) -> None:
    lengths = np.random.default_rng(3).integers(0, 90, 20_000)
    reader = write(tmp_path / "corpus", lengths.tolist())
    theirs = gpt_dataset(tmp_path / "corpus", config(48, 7, (["corpus"], None), "98,2,0"), Split.train, num_samples)
    first, last = split_ranges([98, 2, 0], len(lengths))[0]
    ours = MegatronSamples(reader.lengths[first:last], seq_len=48, num_samples=num_samples, seed=7)
    assert len(ours) == len(theirs)
    assert ours.epochs == (1 if num_samples is None else 3)
    for index in range(0, len(ours), 97):
        assert read(reader, first, ours, index) == expected(theirs[index])


def test_a_known_order_stays() -> None:
    """The order recorded from megatron-core 0.16.1, so that a change in both numpy and Megatron would be detected."""
    samples = MegatronSamples(np.array([7, 5, 9, 2], np.int32), seq_len=6, num_samples=5, seed=1234)
    assert [samples.pieces(i) for i in range(len(samples))] == [
        [(0, 0, 7)],
        [(2, 0, 7)],
        [(2, 4, 5), (0, 0, 2)],
        [(0, 1, 6), (0, 0, 1)],
        [(1, 3, 2), (2, 0, 5)],
        [(0, 6, 1), (1, 0, 5), (3, 0, 1)],
        [(2, 6, 3), (1, 0, 4)],
    ]


@settings(max_examples=300)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=3), st.integers(0, 10**9))
# 24.5 rounds to even.
@example([98, 2, 0], 25)
@example([0.1, 0.2, 0.7], 10)
def test_splits_are_cut_where_megatron_cuts(shares: list[float], sequences: int) -> None:
    assume(sum(shares) > 1e-3)
    matrix = config(4, 1, (["corpus"], None), ",".join(f"{share:.9f}" for share in shares)).split_matrix
    ranges = split_ranges([float(f"{share:.9f}") for share in shares], sequences)
    for (first, last), share in zip(ranges, matrix, strict=False):
        if share is None:
            assert first == last
        else:
            assert (first, last) == tuple(round(bound * float(sequences)) for bound in share)


BLENDED = st.lists(
    st.tuples(st.lists(st.integers(1, 30), min_size=100, max_size=130), st.floats(0.05, 5)), min_size=2, max_size=4
)
KINDS = st.sampled_from(["by weight", "by size", "every sample once"])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(BLENDED, SEQ_LENS, SEEDS, st.sampled_from(["98,2,0", "70,20,10"]), st.integers(20, 400), KINDS)
def test_blends_are_those_of_megatrons_builder(
    sets: list[tuple[list[int], float]], seq_len: int, seed: int, shares: str, asked: int, kind: str
) -> None:
    """The sizes of sets and blend, the order and the tokens equal Megatron's; what Megatron refuses is refused."""
    weights = [weight for _, weight in sets] if kind == "by weight" else None
    size = None if kind == "every sample once" else asked
    with tempfile.TemporaryDirectory() as directory:
        prefixes = [Path(directory) / f"set{i}" for i in range(len(sets))]
        readers = [write(prefix, sets[i][0], 10_000 * i) for i, prefix in enumerate(prefixes)]
        ranges = [split_ranges([float(s) for s in shares.split(",")], reader.sequences) for reader in readers]
        parts = [[r.lengths[first:last] for first, last in cut] for r, cut in zip(readers, ranges, strict=True)]
        assume(all(len(part) == 0 or part.sum() > seq_len for split in parts for part in split))
        built = config(seq_len, seed, ([str(prefix) for prefix in prefixes], weights), shares)
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [size] * 3, lambda: True, built)
        present = [split.value for split in Split if built.split_matrix[split.value] is not None]
        ours = {split: blend_of([part[split] for part in parts], weights, size, seq_len, seed) for split in present}
        try:
            theirs = builder.build()
        # Megatron's margin was too small for a blend of so few samples.
        except IndexError:
            assert any(refused(blend, samples) for blend, samples in ours.values())
            return
        assert [split for split in range(3) if theirs[split] is not None] == present
        for split, (blend, samples) in ours.items():
            assert not refused(blend, samples)
            assert len(blend) == len(theirs[split])
            for index, (number, local) in enumerate(zip(*blend.locate(np.arange(len(blend))), strict=True)):
                item = theirs[split][index]
                assert number == item["dataset_id"]
                assert read(readers[number], ranges[number][split][0], samples[number], local) == expected(item)


def blend_of(
    parts: list[Any], weights: list[float] | None, size: int | None, seq_len: int, seed: int
) -> tuple[MegatronBlend, list[MegatronSamples]]:
    """Build the blend from the lengths of one split of each set, as a caller would."""
    if weights is not None and size is not None:
        plan = plan_blend(weights, size)
        samples = [
            MegatronSamples(part, seq_len=seq_len, num_samples=count, seed=seed)
            for part, count in zip(parts, plan.num_samples, strict=True)
        ]
        return MegatronBlend(plan.weights, plan.size), samples
    samples = [MegatronSamples(part, seq_len=seq_len, num_samples=None, seed=seed) for part in parts]
    counts = [len(s) for s in samples]
    return MegatronBlend(counts, None if size is None else min(size, sum(counts))), samples


def refused(blend: MegatronBlend, samples: list[MegatronSamples]) -> bool:
    try:
        blend.refuse_oversampling([len(s) for s in samples])
    except ArgosyError:
        return True
    return False


def greedy(weights: Sequence[float], size: int) -> tuple[Any, Any]:
    """Return Megatron's blend, from its own compiled code if that does not fuse."""
    sets, local = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(sets, local, np.array(weights), len(weights), size, False)
    return sets, local


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(1, 200_000), st.integers(0, 200_000))
# With equal errors the first set is drawn.
@example([1.0, 1.0, 1.0, 1.0], 70_000, 0)
@example([1.0, 2.0, 1.0], 70_000, 65_000)
@example([1e-3, 1e3, 1e-3], 150_000, 60_000)
@example([1.0], 10, 0)
def test_a_blend_follows_megatrons_greedy_rule(weights: list[float], size: int, start: int) -> None:
    blend, start = MegatronBlend(weights, size), start % size
    sets, local = greedy(blend.weights.tolist(), size)
    # Start in the middle: checkpoints must be computed first.
    found = blend.locate(np.arange(start, size))
    assert np.array_equal(found[0], sets[start:])
    assert np.array_equal(found[1], local[start:])
    assert blend.counts(size).tolist() == np.bincount(sets, minlength=len(weights)).tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=9), st.randoms(use_true_random=False))
@example([70_000, 1, 3], None)
@example([5, 5, 5], None)
def test_without_a_size_each_sample_comes_exactly_once(sizes: list[int], random: Any) -> None:
    total = sum(sizes)
    sets, local = np.zeros(total, np.int16), np.zeros(total, np.int64)
    helpers.build_exhaustive_blending_indices(sets, local, np.array(sizes), len(sizes))
    blend = MegatronBlend(sizes, None)
    order = list(range(0, total, 101))
    if random is not None:
        random.shuffle(order)
    for part in (np.array(order), np.arange(total)):
        found = blend.locate(part)
        assert np.array_equal(found[0], sets[part])
        assert np.array_equal(found[1], local[part])
    assert len(blend) == total
    assert blend.counts(total).tolist() == sizes


@pytest.mark.parametrize(
    ("sets", "size", "digest"),
    [
        (8, 9_000_000, "dc44ea167d45b1bfe6c7983628e581206f4b293f31299339a634d7dcfde8742d"),
        (60, 1_500_000, "2002cab68b29609d2ed00364d668b4c917da6bba3451a8990fdcbc0344746a1f"),
    ],
)
def test_a_blend_far_from_its_beginning(sets: int, size: int, digest: str) -> None:
    """The blend beyond the number of parallel lanes, with sets that give one sample in six million.

    Recorded from megatron-core 0.16.1's helper on x86.
    """
    blend = MegatronBlend((np.random.default_rng(sets).integers(1, 1000, sets) ** 2).astype(float).tolist(), size)
    found = hashlib.sha256()
    for start in (size - 1000, 0, size // 2):
        for part in blend.locate(np.arange(start, start + 1000)):
            found.update(part.astype("<i8").tobytes())
    assert found.hexdigest() == digest


def test_ties_are_broken_as_on_x86_on_every_machine() -> None:
    """The order recorded from megatron-core 0.16.1's helper on x86. With a fused multiply-add, 396 of the 1,000 samples differ."""
    sets, _ = MegatronBlend(TIES, 1000).locate(np.arange(1000))
    assert sets[:24].tolist() == [3, 2, 1, 0, 3, 2, 3, 1, 2, 3, 0, 3, 2, 1, 3, 2, 3, 1, 2, 3, 0, 3, 2, 1]
    expected = "71891fceb95382cd107c3f0d7cfa469c11fcb7ef1e6c3beff9344eaf3a3eeedc"
    assert hashlib.sha256(sets.astype("<i2").tobytes()).hexdigest() == expected


@pytest.mark.parametrize("weights", [TIES, (1.0, 1.0, 1.0), (5.0, 0.3, 2.0, 2.0, 1e-3)])
def test_what_takes_the_place_of_a_fused_helper_is_megatrons_rule(weights: tuple[float, ...]) -> None:
    normal, sizes = np.array(weights) / np.sum(weights), np.array([int(1 + 100 * weight) for weight in weights])
    sets, local = np.zeros((2, 900), np.int16), np.zeros((2, 900), np.int64)
    once, locally = np.zeros((2, sizes.sum()), np.int16), np.zeros((2, sizes.sum()), np.int64)
    for row, (blend, exhaust) in enumerate(
        (
            (helpers.build_blending_indices, helpers.build_exhaustive_blending_indices),
            (blending_indices, exhaustive_blending_indices),
        )
    ):
        blend(sets[row], local[row], normal, len(weights), 900, False)
        exhaust(once[row], locally[row], sizes, len(weights))
    for found in (sets, local, once, locally):
        assert np.array_equal(found[0], found[1])


def test_a_blend_plans_megatrons_margin() -> None:
    plan = plan_blend([0.3, 0.7], 1000)
    assert (plan.num_samples, plan.size) == ([302, 704], 1000)
    assert plan_blend([1, 1, 1], 1000).size == 3 * 334


def test_a_blend_that_takes_too_much_of_a_set_is_refused_with_its_numbers() -> None:
    blend = MegatronBlend([3, 1], 1000)
    blend.refuse_oversampling([750, 250])
    with pytest.raises(ArgosyError) as refusal:
        blend.refuse_oversampling([750, 249])
    assert refusal.value.code == "config.arithmetic"
    for number in ("1,000 samples", "250 of set 1", "has 249"):
        assert number in refusal.value.cause


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -2.0], [math.nan], [math.inf, 1.0]])
def test_weights_that_megatron_cannot_blend_are_refused(weights: list[float]) -> None:
    for attempt in (lambda: plan_blend(weights, 10), lambda: MegatronBlend(weights, 10)):
        with pytest.raises(ArgosyError) as refusal:
            attempt()
        assert refusal.value.code == "config.bad-value"


@pytest.mark.parametrize(("lengths", "num_samples"), [([], 10), ([], None), ([0, 0, 0], 10), ([2, 2], None)])
def test_a_split_without_a_sample_is_refused_with_its_numbers(lengths: list[int], num_samples: int | None) -> None:
    with pytest.raises(ArgosyError) as refusal:
        MegatronSamples(np.array(lengths, np.int32), seq_len=4, num_samples=num_samples, seed=1, name="validation")
    assert refusal.value.code == "data.empty-split"
    for number in (f"validation split of the corpus has {len(lengths)} sequences", f"{sum(lengths)} tokens", "needs 5"):
        assert number in refusal.value.cause


@pytest.mark.parametrize(("key", "value"), [("seq_len", 0), ("seed", -1), ("seed", 2**32), ("num_samples", -1)])
def test_numbers_out_of_range_are_refused(key: str, value: int) -> None:
    numbers = {"seq_len": 4, "seed": 1, "num_samples": 3} | {key: value}
    with pytest.raises(ArgosyError) as refusal:
        MegatronSamples(np.array([9, 9], np.int32), **numbers)
    assert refusal.value.code == "config.bad-value"


def test_samples_outside_the_set_are_not_given() -> None:
    samples = MegatronSamples(np.array([9, 9], np.int32), seq_len=4, num_samples=None, seed=1)
    for outside in (-1, len(samples)):
        with pytest.raises(IndexError):
            samples.pieces(outside)
        with pytest.raises(IndexError):
            MegatronBlend([1.0, 2.0], len(samples)).locate(np.array([outside]))


class TestCache:
    lengths = np.random.default_rng(1).integers(0, 50, 140).astype(np.int32)

    def samples(self, cache_dir: Path | None, **changes: Any) -> list[Any]:
        arguments: dict[str, Any] = {"lengths": self.lengths, "seq_len": 16, "num_samples": 500, "seed": 5} | changes
        samples = MegatronSamples(arguments.pop("lengths"), cache_dir=cache_dir, **arguments)
        return [samples.pieces(i) for i in range(len(samples))]

    def test_a_second_start_reads_what_the_first_built(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = self.samples(None)
        assert self.samples(tmp_path / "new" / "cache") == plain
        monkeypatch.delattr(np.random, "RandomState")
        assert self.samples(tmp_path / "new" / "cache") == plain
        # A plain .npy of bytes.
        file = np.load(next((tmp_path / "new" / "cache").iterdir()), allow_pickle=False)
        assert (file.dtype, file.ndim) == (np.uint8, 1)

    def test_whatever_changes_the_samples_has_a_file_of_its_own(self, tmp_path: Path) -> None:
        other = self.lengths.copy()
        # The same number of sequences and tokens, but other content.
        other[[3, 4]] = other[[4, 3]]
        changes: list[dict[str, Any]] = [
            {}, {"lengths": other}, {"lengths": self.lengths[1:]}, {"seq_len": 17}, {"seed": 6}, {"num_samples": 1800},
            {"extra_token": False},
        ]  # fmt: skip
        for change in changes * 2:
            assert self.samples(tmp_path, **change) == self.samples(None, **change)
        assert len(list(tmp_path.iterdir())) == len(changes)

    def test_a_file_cut_anywhere_or_damaged_or_foreign_is_built_again(self, tmp_path: Path) -> None:
        plain = self.samples(tmp_path)
        path = next(tmp_path.iterdir())
        whole = path.read_bytes()
        bad = [whole[:cut] for cut in (0, 1, 60, 128, 129, 200, len(whole) // 2, len(whole) - 1)] + [whole + b"\0"]
        for at in (0, 7, 90, 130, 165, len(whole) // 3, len(whole) // 2, len(whole) - 40, len(whole) - 1):
            bad.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        bad.append(whole[:-32] + bytes(32))
        bad.append(pickle.dumps({"never": "loaded"}))
        self.samples(tmp_path, seed=6)
        # A valid file, but of another seed.
        bad.append(next(p for p in tmp_path.iterdir() if p != path).read_bytes())
        for content in bad:
            path.write_bytes(content)
            assert self.samples(tmp_path) == plain
            assert path.read_bytes() == whole

    def test_processes_that_build_at_once_leave_one_sound_file(self, tmp_path: Path) -> None:
        plain = self.samples(None)
        with ThreadPoolExecutor(8) as pool:
            assert all(found == plain for found in pool.map(lambda _: self.samples(tmp_path), range(16)))
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_cache_that_cannot_be_written_stops_nothing_and_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        samples = MegatronSamples(self.lengths, seq_len=16, num_samples=500, seed=5, cache_dir=tmp_path / "file")
        assert [samples.pieces(i) for i in range(len(samples))] == self.samples(None)
        assert samples.cache_problem is not None
        assert str(tmp_path / "file") in samples.cache_problem

    def test_no_samples_can_be_kept_too(self, tmp_path: Path) -> None:
        for _ in range(2):
            assert self.samples(tmp_path, lengths=np.array([3], np.int32), num_samples=0) == []

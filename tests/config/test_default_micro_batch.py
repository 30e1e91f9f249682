"""The micro-batch of a spec that leaves it open is one that the checks of the spec accept, if there is one."""

from __future__ import annotations

import pytest

from argosy.config.default_micro_batch import FINAL, UNTIL_START
from argosy.config.fp8_rules import fp8_micro_batch
from argosy.config.resolve import Resolved, resolve
from argosy.errors import ArgosyError

KEYS = ["data.train=corpus", "train.steps=10", "optim.lr=1e-4"]
FP8 = "train.precision=fp8"


def resolved(*keys: str) -> Resolved:
    return resolve(None, ["model=gpt2", *KEYS, *keys])


def size(*keys: str) -> int:
    return resolved(*keys).spec.parallel.micro_batch


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["train.global_batch=18", "data.seq_len=1000"], 6),
        (["train.global_batch=32", "data.seq_len=1001"], 16),
        # A rank has 500 tokens of a sample, so micro-batches are multiples of 4: 12 x 500 = 6,000 = 375 x 16.
        (["train.global_batch=24", "data.seq_len=1000", "parallel.cp=2"], 12),
        # Larger than 16,384 tokens: none of those is aligned.
        (["train.global_batch=16", "model.max_seq_len=2049", "data.seq_len=2049"], 16),
        (["train.global_batch=36", "data.seq_len=1000", "parallel.dp_replicate=2"], 6),
        (["model=t5-small", "train.global_batch=48", "data.seq_len=512"], 16),
    ],
)
def test_fp8_gets_tokens_that_it_can_multiply(keys: list[str], expected: int) -> None:
    assert size(*keys, FP8) == expected


def test_bf16_needs_no_alignment() -> None:
    assert size("train.global_batch=18", "data.seq_len=1000") == 9


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        (
            ["train.global_batch=5", "data.seq_len=24"],
            "a train.global_batch that is a multiple of 2, with parallel.micro_batch=2, or a data.seq_len that is a multiple of 16",
        ),
        (
            ["train.global_batch=6", "data.seq_len=24", "parallel.dp_replicate=2"],
            "a train.global_batch that is a multiple of 4 = 2 x 2 data-parallel ranks, with parallel.micro_batch=2, or a data.seq_len "
            "that is a multiple of 16",
        ),
        (
            ["train.global_batch=6", "data.seq_len=24", "parallel.micro_batch=3"],
            "parallel.micro_batch=2 or a multiple of it, or a data.seq_len that is a multiple of 16",
        ),
        (
            ["train.global_batch=2", "data.seq_len=24", "parallel.micro_batch=1"],
            "parallel.micro_batch=2, or a data.seq_len that is a multiple of 16",
        ),
        (
            ["train.global_batch=9", "data.seq_len=24", "train.batch_rampup={start: 3, increment: 3, samples: 9}"],
            "a train.global_batch, batch_rampup.start and batch_rampup.increment that are multiples of 2, with "
            "parallel.micro_batch=2, or a data.seq_len that is a multiple of 16",
        ),
    ],
)
def test_fp8_is_refused_with_what_the_batch_allows(keys: list[str], fix: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        resolved(*keys, FP8)
    assert (refused.value.code, refused.value.key) == ("config.arithmetic", "train.precision")
    assert refused.value.fix == fix


def test_the_multiple_is_that_of_all_sequences_of_a_sample() -> None:
    assert fp8_micro_batch([1024]) == 1
    assert fp8_micro_batch([1000]) == 2
    assert fp8_micro_batch([1000], cp=2) == 4
    assert fp8_micro_batch([1000, 60]) == 4
    assert fp8_micro_batch([1024, None]) == 16


def test_widths_that_fp8_cannot_multiply_are_refused_before_the_model_is_built() -> None:
    with pytest.raises(ArgosyError, match="no linear layer in the blocks has that: their sizes are 776, 2328, 3104"):
        resolved("train.global_batch=16", "model.hidden=776", "model.heads=8", FP8)


def test_a_pipeline_schedule_gets_the_micro_batches_that_it_needs() -> None:
    assert size("train.global_batch=16", "parallel.pp=2") == 16
    # 2 x pp at least.
    assert size("train.global_batch=16", "parallel.pp=2", "parallel.schedule=dualpipev") == 4
    # At most 16 samples of 1,024 tokens. 2 micro-batches of 9 are one round, as are any that are fewer than 4.
    assert (
        size("train.global_batch=18", "data.seq_len=1024", "parallel.pp=4", "parallel.schedule=interleaved-1f1b") == 9
    )


def test_the_origin_says_whether_a_gpu_run_chooses_another() -> None:
    of = "parallel.micro_batch"
    assert resolved("train.global_batch=16").origins[of] == UNTIL_START
    assert resolved("train.global_batch=16", "train.device=cpu").origins[of] == FINAL
    assert resolved("model=bert-base", "train.global_batch=16").origins[of] == FINAL
    assert resolved("train.global_batch=16", "parallel.micro_batch=2").origins[of] == "command line"

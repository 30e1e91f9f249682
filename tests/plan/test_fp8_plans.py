"""A plan in fp8 is one that `argosy train` accepts: aligned tokens, and a model with layers of aligned widths."""

from __future__ import annotations

import pytest

from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.plan.advise import Advice, Question, answer
from argosy.plan.layout_rules import violations
from argosy.plan.layouts import Layout, Work

KEYS = ["model=gpt2", "data.train=corpus", "train.steps=10", "optim.lr=1e-4"]


def planned(*keys: str, cluster: str = "1xH100", target: object = None, **asked: object) -> Advice:
    nothing = dict.fromkeys(("global_batch", "seq_len", "tokens", "precision", "what_if", "price", "hardware"))
    overrides = [*KEYS, *keys] if target is None else []
    question = Question.read(target or {}, overrides, cluster=cluster, **nothing | asked)  # type: ignore[arg-type]
    return answer(question, top=1)


def test_fp8_is_not_offered_or_planned_where_no_layer_can_have_it() -> None:
    narrow = ["model.hidden=776", "model.heads=8", "train.global_batch=16"]
    assert planned(*narrow).narrow is None
    assert planned("train.global_batch=16").narrow is not None
    with pytest.raises(ArgosyError, match="their sizes are 776, 2328, 3104") as refused:
        planned(*narrow, precision="fp8")
    with pytest.raises(ArgosyError) as by_train:
        resolve(None, [*KEYS, *narrow, "train.precision=fp8"])
    assert (refused.value.cause, refused.value.fix) == (by_train.value.cause, by_train.value.fix)


def test_fp8_is_offered_with_a_micro_batch_that_it_can_have() -> None:
    same = planned("train.global_batch=1001", "data.seq_len=1024")
    assert same.narrow is not None
    assert same.narrow.layout == same.shown[0].layout
    # 75 samples of 1,000 tokens are no multiple of 16 tokens.
    other = planned("train.global_batch=150", "data.seq_len=1000")
    assert other.narrow is not None
    assert (other.shown[0].layout.micro_batch, other.narrow.layout.micro_batch) == (75, 50)
    assert any("GiB with micro_batch=50; they change the numerics" in line for line in other.lines())
    assert planned("train.global_batch=150", "data.seq_len=1000", what_if="micro_batch=75").narrow is None
    assert planned("train.global_batch=15", "data.seq_len=1000").narrow is None


def test_a_plan_in_fp8_has_aligned_tokens() -> None:
    found = planned(target="gpt2", precision="fp8", seq_len=1001, global_batch=48).found
    assert {candidate.layout.micro_batch for candidate in found.best} == {16, 48}
    with pytest.raises(ArgosyError, match="multiples of 16, and a batch of 8 cannot be split into those") as refused:
        planned(target="gpt2", precision="fp8", seq_len=1001, global_batch=8)
    assert (
        refused.value.fix == "a train.global_batch that is a multiple of 16, or a data.seq_len that is a multiple of 16"
    )
    several = planned(target="gpt2", cluster="8xH100", precision="fp8", seq_len=1000, global_batch=24).found
    assert several.best
    assert all(candidate.layout.micro_batch % 2 == 0 for candidate in several.best)
    # The targets of T5 can have any length.
    t5 = planned(target="t5-small", precision="fp8", seq_len=512, global_batch=96).found
    assert all(candidate.layout.micro_batch % 16 == 0 for candidate in t5.best)


def test_the_rule_names_the_tokens() -> None:
    model = resolve(None, [*KEYS, "train.global_batch=8"]).spec.model
    work = Work(model, 1000, 8, "fp8")
    assert list(violations(work, Layout(micro_batch=1), 1)) == [
        "fp8 matmuls need a multiple of 16 tokens in a forward pass; micro_batch 1 x seq_len 1000 = 1000"
    ]
    assert not list(violations(work, Layout(micro_batch=2), 1))
    assert "1000 / cp 2" in " ".join(violations(work, Layout(cp=2, micro_batch=2), 2))


def refused(*keys: str, **asked: object) -> ArgosyError:
    with pytest.raises(ArgosyError) as error:
        planned(*keys, **asked)  # type: ignore[arg-type]
    return error.value


def test_targets_of_any_length_are_the_cause_and_not_the_samples() -> None:
    error = refused(target="t5-small", precision="fp8", seq_len=512, global_batch=8)
    assert "T5's targets can have any length" in error.cause
    assert "512" not in error.cause
    assert (error.origin, error.fix) == ("--precision", "a train.global_batch that is a multiple of 16")


def test_the_origin_of_the_precision_is_the_run_specs_if_it_has_one() -> None:
    error = refused("train.global_batch=32", "train.precision=fp8", seq_len=1001, global_batch=8)
    assert (error.key, error.origin) == ("train.precision", "command line")
    error = refused("train.global_batch=32", "train.precision=fp8", cluster="1xA100-40")
    assert (error.key, error.origin) == ("train.precision", "command line")
    error = refused("train.global_batch=32", precision="fp8", cluster="1xA100-40")
    assert (error.key, error.origin) == ("--precision", None)


def test_the_fix_for_a_batch_that_ramps_up_names_all_its_sizes() -> None:
    ramp = "train.batch_rampup={start: 8, increment: 4, samples: 1000}"
    error = refused("train.global_batch=64", ramp, precision="fp8", seq_len=1001)
    assert "batches that are multiples of 4 cannot be split into those" in error.cause
    assert (error.fix or "").startswith(
        "a train.global_batch, batch_rampup.start and batch_rampup.increment that are multiples of 16"
    )


def test_no_layout_with_fp8_names_the_batch_that_its_ranks_need() -> None:
    held = refused(target="gpt2", cluster="8xH100", precision="fp8", seq_len=1001, global_batch=80, what_if="dp=8")
    assert "micro_batch 1" not in held.cause
    assert "a batch of 80 cannot be split into those on 8 data-parallel ranks" in held.cause
    assert (held.fix or "").startswith("a train.global_batch that is a multiple of 128 = 16 x 8 data-parallel ranks")
    odd = refused(target="gpt2", cluster="13xH100", precision="fp8", seq_len=1001, global_batch=80)
    assert "fp8 matmuls need a multiple of 16 tokens" in odd.cause
    assert odd.fix == "a train.global_batch that is a multiple of 208 = 16 x 13 data-parallel ranks"


def test_fp8_is_offered_only_with_a_layout_that_can_run() -> None:
    # Samples of 14,008 tokens need an even micro-batch in fp8, and 5 micro-batches of 2 cannot be interleaved on 2 ranks.
    asked = {"target": "llama3-1b", "cluster": "2xH100", "seq_len": 14008, "what_if": "pp=2,vpp=2,tp=1"}
    advice = planned(global_batch=10, **asked)
    assert advice.shown[0].layout.micro_batch in (1, 5)
    assert advice.narrow is None
    advice = planned(global_batch=8, **asked)
    assert advice.narrow is not None
    assert not list(violations(advice.narrow.work, advice.narrow.layout, 2))

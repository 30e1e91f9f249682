"""Predicted memory against measurements: Argosy on an H200, and published runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.model.ops import cross_entropy, fp8_cross_entropy
from argosy.plan import memory
from argosy.plan.advise import work_of
from argosy.plan.calibration import calibration
from argosy.plan.layout_rules import violations
from argosy.plan.layouts import Latent, Layout, Work, stage_layers
from argosy.plan.memory import StageMemory, in_flight, memory_of, stage_parameters


def stages(work: Work, layout: Layout, stack: str = "argosy") -> list[StageMemory]:
    known = calibration()
    return memory_of(work, layout, known.stacks[stack], known)


def test_a_pipeline_of_two_stages_is_uneven() -> None:
    # GPT-2 large on two H200, one micro-batch of 64: 59.8 and 86.2 GiB on the device (seen by nvidia-smi).
    model = resolve_model("gpt2-large", ["heads=16", "vocab_size=50304", "dropout=0.1"])
    first, last = stages(Work(model, 1024, 64), Layout(pp=2, micro_batch=64), "megatron")
    assert last.device == pytest.approx(86.2, rel=0.06)
    assert first.device == pytest.approx(59.8, rel=0.06)


def test_stages_hold_all_parameters_once() -> None:
    for name in ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "llama2-70b", "t5-v1.1-large"):
        work = Work(resolve_model(name), 4096, 8)
        for layout in (Layout(), Layout(pp=4), Layout(pp=3), Layout(pp=3, vpp=4), Layout(pp=5, vpp=2, schedule="zbv")):
            held = 0.0
            for stage, layers in enumerate(stage_layers(work, layout, levelled=layout.vpp > 1)):
                first, last = layout.ends(stage)
                held += sum(stage_parameters(work, layout, layers, first=first, last=last))
            assert held == pytest.approx(count_parameters(work.model).total, rel=1e-3)


def test_latent_attention_and_shared_experts_make_deepseek_v3() -> None:
    moe = {"experts": 256, "top_k": 8, "ffn": 2048, "shared_experts": 1, "dense_layers": 3}
    shape = {
        "layers": 61,
        "hidden": 7168,
        "heads": 128,
        "kv_heads": 128,
        "head_dim": 128,
        "ffn": 18432,
        "vocab_size": 129_280,
    }
    model = resolve_model("llama2-7b", [f"{key}={value}" for key, value in shape.items()])
    model = ModelSpec.model_validate(model.model_dump() | {"moe": moe})
    work = Work(model, 4096, 8, latent=Latent())
    assert sum(stage_parameters(work, Layout(), 61, first=True, last=True)) == pytest.approx(671e9, rel=0.002)
    shared, split = (
        stage_parameters(work, Layout(tp=8, ep=64, etp=etp, dp=64), 61, first=True, last=True)[1] for etp in (8, 1)
    )
    assert split == 8 * shared


def test_a_loss_in_chunks_needs_no_more_for_more_tokens() -> None:
    few, many = (
        stages(Work(resolve_model("llama3-1b"), 8192, batch), Layout(micro_batch=batch))[0].logits for batch in (2, 8)
    )
    # Only the gradient of the head's input grows.
    assert many - few == pytest.approx(6 * 8192 * 2048 * 2 / 2**30, abs=0.02)


def test_a_head_in_8_bits_holds_its_weight_and_the_gradients_of_a_group_of_chunks() -> None:
    model = resolve_model("llama3-1b")
    head = 128256 * 2048 / 2**30

    def held(precision: str, batch: int, micro_batch: int, losses: int = 0) -> StageMemory:
        work = Work(model, 2048, batch, precision=precision, sample_losses=losses)
        return stages(work, Layout(micro_batch=micro_batch))[0]

    # 2 x 2048 tokens are one chunk: 16-bit logits, and their gradients in 8 bits twice; in 16 bits the logits and the weight's gradient.
    each, of_weight = 2 * 2 * 2048 * 128256 / 2**30, 4 * head
    assert held("fp8", 2, 2).logits - held("bf16", 2, 2).logits == pytest.approx(head + each - of_weight, abs=0.01)
    # It is kept for other micro-batches, beside the layers' weights.
    assert held("fp8", 4, 2).logits - held("bf16", 4, 2).logits == pytest.approx(each - of_weight, abs=0.01)
    layers = 2 * 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192) / 2**30
    assert held("fp8", 4, 2).buffers - held("bf16", 4, 2).buffers == pytest.approx(head + layers, rel=0.01)
    # Eight chunks are two groups: half of the gradients, the logits of a chunk, 8-bit values of it, and the first group's sum.
    more = 4 * each / 2 + 1.5 * each + of_weight + head
    assert held("fp8", 16, 16).logits - held("bf16", 16, 16).logits == pytest.approx(
        more - 2 * each - of_weight, abs=0.02
    )
    assert held("fp8", 2, 2, losses=2).logits == held("bf16", 2, 2, losses=2).logits
    # A vocabulary that is no multiple of 16 is copied, with padding.
    odd = resolve_model("llama3-1b", ["vocab_size=128255", "vocab_multiple=1"])
    found, even = (stages(Work(m, 2048, 2, precision="fp8"), Layout(micro_batch=2))[0].logits for m in (odd, model))
    assert found - even == pytest.approx(2 * head, abs=0.01)
    # A frozen head needs the gradients of one chunk alone, and none of the weight.
    model = resolve_model("llama3-1b", ["lora.rank=8"])
    assert held("fp8", 16, 16).logits - held("bf16", 16, 16).logits == pytest.approx(head, abs=0.02)


def test_the_planner_knows_how_the_loss_is_cut() -> None:
    assert (memory.LOSS_CHUNK, memory.LOSS_GROUP) == (cross_entropy.CHUNK_BYTES, fp8_cross_entropy.GROUP_BYTES)


def test_the_share_of_tokens_that_are_predicted_is_the_tasks() -> None:
    def plan(rate: float) -> Work:
        keys = [
            "model=bert-base",
            "data.train=corpus",
            "data.seq_len=512",
            "train.global_batch=64",
            "train.steps=9",
            "optim.lr=1e-4",
        ]
        return work_of(resolve(None, [*keys, f"data.bert.mask_rate={rate}"]).spec)

    few, many = (stages(plan(rate), Layout(micro_batch=64))[0] for rate in (0.15, 0.9))
    assert many.logits > few.logits
    assert plan(0.15).sizes.predicted == 0.15


def test_in_flight_micro_batches() -> None:
    assert {in_flight(Layout(pp=4, vpp=2, schedule="zbv"), 16, stage) for stage in range(4)} == {4}
    assert in_flight(Layout(pp=4, schedule="gpipe"), 16, 3) == 16
    assert [in_flight(Layout(pp=4), 16, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(pp=4), 2, 0) == 2
    assert in_flight(Layout(pp=4, vpp=2), 16, 0) == pytest.approx((6 + 4 + 1) / 2)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro_batch=st.sampled_from([1, 2, 4]),
)
def test_sharding_and_recompute_never_add_memory(tp: int, zero: int, recompute: str, micro_batch: int) -> None:
    work = Work(resolve_model("llama3-8b"), 4096, 64)
    kinds = ["none", "selective", "full"]

    def peak(layout: Layout) -> float:
        return max(stage.allocated for stage in stages(work, layout))

    layout = Layout(tp=tp, dp=16, zero=zero, micro_batch=micro_batch, recompute=recompute)  # type: ignore[arg-type]
    for less in kinds[: kinds.index(recompute)]:
        assert peak(layout) <= peak(Layout(tp=tp, dp=16, zero=zero, micro_batch=micro_batch, recompute=less))  # type: ignore[arg-type]
    if 0 < zero < 3:
        assert peak(layout) <= peak(Layout(tp=tp, dp=16, zero=zero - 1, micro_batch=micro_batch, recompute=recompute))  # type: ignore[arg-type]


def test_a_layout_that_cannot_run_says_why() -> None:
    work = Work(resolve_model("gpt2-large"), 1024, 30)
    said = " ".join(violations(work, Layout(tp=8, dp=2, micro_batch=4), 16))
    assert "heads 20 is not divisible by tp 8" in said
    assert "global_batch 30 is not divisible by dp 2 x micro_batch 4" in said
    assert not list(violations(work, Layout(tp=2, dp=2, micro_batch=3), 4))


def test_an_optimisers_copy_of_the_gradients_is_sharded_as_it_is() -> None:
    work, known = Work(resolve_model("gpt3-18.4b"), 2048, 64), calibration()

    def widened(zero: int, dp: int) -> float:
        stack, layout = known.stacks["megatron-deepspeed"], Layout(tp=8, dp=dp, zero=zero, recompute="full")
        without = stack.model_copy(update={"widened": 0.0})
        return memory_of(work, layout, stack, known)[0].gradients - memory_of(work, layout, without, known)[0].gradients

    assert widened(0, 8) > 8  # GiB
    assert widened(1, 8) < widened(0, 8) / 4

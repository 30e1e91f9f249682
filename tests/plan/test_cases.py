"""Users' cases: runs they measured, or wanted to plan before paying for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.resolve import resolve_model
from argosy.plan.advise import Advice, Question, answer
from argosy.plan.calibration import calibration
from argosy.plan.hardware import parse_cluster
from argosy.plan.layouts import Layout, Work
from argosy.plan.log import read_log
from argosy.plan.search import evaluate, warnings


def advice(model: str, cluster: str, batch: int, seq_len: int, *changes: str, log: Path | None = None) -> Advice:
    question = Question.read(
        model, list(changes), cluster=cluster, global_batch=batch, seq_len=seq_len, tokens=None, precision=None,
        what_if=None, price=None, hardware=None,
    )  # fmt: skip
    return answer(question, log=None if log is None else read_log(log))


def test_one_micro_batch_in_two_stages() -> None:
    # GPT-2 large by Megatron-LM on two H200: 0.817 s a step, 59.8 and 86.2 GiB; on one, with half the batch, 0.438 s.
    known, model = calibration(), resolve_model("gpt2-large", ["heads=16", "vocab_size=50304", "dropout=0.1"])
    stack, pair = known.stacks["megatron"], parse_cluster("2xH200")
    run = evaluate(Work(model, 1024, 64), Layout(pp=2, micro_batch=64), pair, stack, known)
    assert run.time.bubble == pytest.approx(0.5, abs=0.06)
    assert run.time.total == pytest.approx(0.817, rel=0.15)
    assert [stage.device for stage in run.stages] == pytest.approx([59.8, 86.2], rel=0.06)
    said = " ".join(warnings(run))
    assert "1 micro-batches for 2 stages" in said
    assert "memory is uneven over the stages" in said
    four = evaluate(Work(model, 1024, 64), Layout(pp=2, micro_batch=16), pair, stack, known)
    assert four.time.bubble < 0.25 < run.time.bubble


def test_seven_billion_on_sixteen_a100_of_40_gb() -> None:
    best = advice("llama2-7b", "2xp4d.24xlarge", 512, 4096).shown
    for candidate in best:
        assert candidate.fits
        assert candidate.layout.gpus == 16
        # Within a node: eight GPUs share 400 Gbit/s.
        assert candidate.layout.tp <= 8
    assert best[0].fullest.device < 39.4
    assert best[0].time.bubble < 0.05
    assert 0.40 < best[0].mfu < 0.65


@pytest.mark.parametrize("node", ["Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5"])
def test_175_billion_on_512_gpus(node: str) -> None:
    found = advice("gpt3-175b", f"64x{node}", 8192, 2048)
    best = found.shown[0]
    assert best.fits
    assert best.layout.gpus == 512
    assert best.layout.tp <= 8
    assert 0.35 < best.mfu < 0.65
    [line] = [line for line in found.lines() if line.startswith("checkpoint")]
    # 12 bytes per parameter.
    assert "2,095.3 GB" in line
    assert "1,048 s at 2 GB/s" in line


def test_a_run_of_years_that_learns_nothing(tmp_path: Path) -> None:
    # GPT of 7.5 B parameters on eight H100: the loss scale halves and every step is skipped, 243 s each, of 508,626.
    steps = [(255_940.5, 2**32), (243_438.3, 2**31), (243_344.4, 2**30)]
    log = tmp_path / "log"
    log.write_text(
        "\n".join(
            f"iteration {n:8d}/  508626 | consumed samples: {288 * n:12d} | elapsed time per iteration (ms): {ms:.1f} | "
            f"learning rate: 0.000E+00 | global batch size:   288 | loss scale: {scale:.1f} | "
            "number of skipped iterations:   1 | number of nan iterations:   0 |"
            for n, (ms, scale) in enumerate(steps, 1)
        )
    )
    told = "\n".join(advice("gpt3-6.7b", "1xp5.48xlarge", 288, 2048, "layers=36", log=log).lines())
    assert "(3.9 years)" in told
    assert "MFU 1.5%" in told or "MFU 1.4%" in told
    assert "times the plan" in told
    assert "3 of 3 steps were skipped because their gradients overflowed" in told
    assert "loss scale of 1,073,741,824; nothing has been learned yet" in told


def test_eight_bit_products_are_offered_and_not_chosen() -> None:
    asked = advice("llama3-8b", "8xH100", 128, 8192)
    assert {candidate.work.precision for candidate in asked.shown} == {"bf16"}
    assert "precision fp8" in "\n".join(asked.lines())
    assert asked.as_dict()["fp8"]["step_s"] < asked.as_dict()["plans"][0]["step_s"]
    assert advice("llama3-8b", "8xA100-80", 128, 8192).narrow is None


def test_a_card_without_bf16_is_told() -> None:
    assert any("has no bf16" in line for line in advice("gpt2-large", "8xV100-32", 64, 1024).lines())


def test_an_encoder_decoder_has_a_plan() -> None:
    found = advice("t5-large", "8xA100-80", 512, 512)
    assert found.question.work.tokens == 512 * (512 + 114)
    assert 0.2 < found.shown[0].mfu < 0.65
    assert all(candidate.layout.cp == 1 for candidate in found.found.best)


def test_a_pipeline_leaves_room_for_the_head() -> None:
    known, work = calibration(), Work(resolve_model("llama3-8b"), 8192, 64)
    level, other = (
        evaluate(work, Layout(pp=4, dp=2, micro_batch=1, recompute="full"), parse_cluster("8xH100"), stack, known)
        for stack in (known.stacks["argosy"], known.stacks["argosy"].model_copy(update={"levelled": False}))
    )
    assert level.time.total < other.time.total

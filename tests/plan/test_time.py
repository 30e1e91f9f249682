"""Predicted step times follow basic laws, and match measurements of Argosy and of other frameworks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.optimizers.muon import newton_schulz_seconds
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import ParallelSpec
from argosy.config.stage_layers import bubble
from argosy.plan.advise import predict, work_of
from argosy.plan.calibration import calibration
from argosy.plan.hardware import find_gpu, parse_cluster
from argosy.plan.kernels import Rates, efficiency
from argosy.plan.layer import head_seconds, layer_parameters
from argosy.plan.layouts import Layout, Recompute, Schedule, Work
from argosy.plan.links import group
from argosy.plan.time import StepTime, bubble_seconds, micro_batch_time, step_time
from argosy.plan.updating_rank import UpdatingRank


def time_of(work: Work, layout: Layout, cluster: str, stack: str = "argosy") -> StepTime:
    known = calibration()
    return step_time(work, layout, parse_cluster(cluster), known.stacks[stack], known)


@pytest.mark.parametrize(("batch", "recompute", "measured"), [(8, "none", 0.163), (16, "full", 0.306)])
def test_a_host_that_starts_kernels_one_by_one_is_the_limit_of_small_batches(
    batch: int, recompute: Recompute, measured: float
) -> None:
    work, layout = Work(resolve_model("gpt2-large"), 1024, batch), Layout(micro_batch=batch, recompute=recompute)
    known = calibration()
    stack = known.stacks["argosy"].model_copy(update={"replays": False})
    predicted = step_time(work, layout, parse_cluster("1xH200"), stack, known)
    assert predicted.total == pytest.approx(measured, rel=0.10)
    # With a CUDA graph.
    assert time_of(work, layout, "1xH200").total < 0.75 * predicted.total
    assert time_of(work, layout, "1xH200").terms["launches"] == 0
    dropping = Work(resolve_model("gpt2-large", ["dropout=0.1"]), 1024, batch)
    # A model with dropout and recompute runs without a CUDA graph.
    assert (time_of(dropping, layout, "1xH200").terms["launches"] > 0) == (recompute != "none")


@pytest.mark.parametrize(
    ("layout", "can"),
    [
        (Layout(dp=2), ["auto", "on"]), (Layout(tp=2, sp=True), ["on"]), (Layout(cp=2), ["on"]), (Layout(dp=2, tp=2), ["on"]),
        (Layout(dp=2, zero=3), ["on"]), (Layout(dp=2, zero=3, tp=2), ["on"]),
        (Layout(dp=4, zero=3, copies=2), []), (Layout(pp=2), []),
        (Layout(dp=2, zero=3, ep=2), []), (Layout(dp=2, recompute="full"), ["auto", "on"]),
    ],
)  # fmt: skip
def test_several_gpus_replay_a_graph_if_they_can(layout: Layout, can: list[str]) -> None:
    work = Work(resolve_model("gpt2-large"), 1024, 8)
    asked = {"off": replace(work, replayed=False), "auto": work, "on": replace(work, captured_only=True)}
    free = [graph for graph, each in asked.items() if time_of(each, layout, "4xH200").terms["launches"] == 0]
    assert free == can
    keys = ["model=gpt2-large", "data.train=corpus", "train.global_batch=8", "train.steps=9", "optim.lr=1e-3"]
    for graph in ("auto", "on"):
        spec = resolve(None, [*keys, "parallel.dp_replicate=2", f"parallel.graph={graph}"]).spec
        assert work_of(spec).captured_only == (graph == "on")


def test_gradients_are_summed_after_passes_that_are_replayed_and_the_faster_way_is_planned() -> None:
    """A graph saves the host's time, and exposes the sums. Across slow links it loses more than it saves."""
    fast, slow = "8xH200", "16xg5.8xlarge"
    layouts = {fast: Layout(dp=8, micro_batch=1), slow: Layout(dp=16, micro_batch=1)}
    ways = {}
    for cluster, layout in layouts.items():
        work = Work(resolve_model("gpt2-large"), 1024, layout.dp)
        asked = {"off": replace(work, replayed=False), "auto": work, "on": replace(work, captured_only=True)}
        ways[cluster] = {graph: time_of(each, layout, cluster) for graph, each in asked.items()}
    for steps in ways.values():
        assert steps["off"].terms["launches"] > 0 == steps["on"].terms["launches"]
        assert steps["on"].terms["gradients"] > steps["off"].terms["gradients"]
        assert steps["auto"] == min(steps["off"], steps["on"], key=lambda step: step.total)
    assert ways[fast]["auto"] == ways[fast]["on"]
    assert ways[slow]["auto"] == ways[slow]["off"]


@pytest.mark.parametrize(
    ("precision", "width", "free"), [("bf16", 1408, True), ("fp8", 1408, True), ("fp32", 1408, False), ("bf16", 1404, False)]
)  # fmt: skip
def test_experts_are_replayed_only_where_a_gpu_has_a_grouped_matmul_for_them(
    precision: str, width: int, free: bool
) -> None:
    model = resolve_model("mixtral-8x7b", ["layers=2", "hidden=512", "heads=8", "kv_heads=8", f"moe.ffn={width}"])
    work, layout = Work(model, 512, 8, precision), Layout(dp=8)
    assert work.replays(layout) == free
    assert replace(work, captured_only=True).can_capture(layout)


def test_experts_in_fp16_are_planned_without_graphs() -> None:
    keys = ["model=mixtral-8x7b", "data.train=corpus", "train.global_batch=8", "train.steps=9", "optim.lr=1e-3"]
    assert [work_of(resolve(None, [*keys, f"train.precision={p}"]).spec).replayed for p in ("bf16", "fp16")] == [
        True,
        False,
    ]


def test_zero_3_sums_gradients_in_the_bytes_that_the_run_asks_for() -> None:
    """Across slow links, where nothing hides them: an all-gather of 2 bytes for each pass, and a reduce-scatter of 4 or 2."""
    model, layout = resolve_model("llama2-7b"), Layout(zero=3, dp=16, micro_batch=1)
    four, two = (
        time_of(Work(model, 2048, 16, reduced=reduced), layout, "2xp4d.24xlarge").terms["gather"]
        for reduced in (None, 2.0)
    )
    hidden = sum(
        time_of(Work(model, 2048, 16), layout, "2xp4d.24xlarge").terms[name]
        for name in ("products", "attention", "element-wise")
    )
    # Of 8 and 6 bytes, less what the passes hide.
    assert (four + hidden) / (two + hidden) == pytest.approx(8 / 6, rel=0.03)


def test_a_host_as_slow_as_its_device_is_waited_for_and_a_much_slower_one_alone_counts() -> None:
    work, known = Work(resolve_model("gpt2-large"), 1024, 16), calibration()
    stack = known.stacks["argosy"].model_copy(update={"replays": False})
    alone = time_of(work, Layout(micro_batch=16), "1xH200").total
    assert step_time(work, Layout(micro_batch=16), parse_cluster("1xH200"), stack, known).total > 1.08 * alone
    # A slow host's launches hide tensor parallelism's all-reduces: four micro-batches take four times as long as one.
    small = Work(resolve_model("gpt2-large"), 128, 8)
    one, four = (time_of(small, Layout(tp=tp, dp=8 // tp), "8xH200", "megatron-2022") for tp in (1, 4))
    host = [
        step.total - sum(step.terms[name] for name in ("gradients", "optimiser", "outside")) for step in (one, four)
    ]
    assert four.terms["tensor"] > 0.1 * four.total
    assert host[1] == pytest.approx(4 * host[0], rel=0.3)


def test_terms_sum_to_the_step() -> None:
    step = time_of(Work(resolve_model("llama2-7b"), 4096, 64), Layout(tp=2, pp=2, dp=4), "16xH100")
    assert sum(step.terms.values()) == pytest.approx(step.total)


def test_only_a_stack_that_prepares_steps_ahead_takes_no_time_outside_the_layers() -> None:
    work = Work(resolve_model("gpt2"), 1024, 64)
    ours, others = (time_of(work, Layout(micro_batch=64), "1xH200", stack) for stack in ("argosy", "fsdp-compiled"))
    assert ours.terms["outside"] == 0
    assert others.terms["outside"] == calibration().constants["step"]


def test_one_micro_batch_in_two_stages_idles_half_the_step() -> None:
    work = Work(resolve_model("gpt2-large"), 1024, 64)
    assert time_of(work, Layout(pp=2, micro_batch=64), "2xH200").bubble == pytest.approx(0.5, abs=0.05)


def test_tensor_parallelism_across_nodes_is_much_slower() -> None:
    work = Work(resolve_model("gpt3-18.4b"), 2048, 64)
    within = time_of(work, Layout(tp=8, dp=2, micro_batch=4, recompute="full"), "2xp4de.24xlarge", "megatron-2021")
    across = time_of(work, Layout(tp=16, dp=1, micro_batch=4, recompute="full"), "2xp4de.24xlarge", "megatron-2021")
    assert across.total > 1.4 * within.total


@pytest.mark.parametrize(
    ("schedule", "vpp", "batch"),
    [("1f1b", 1, 16), ("interleaved-1f1b", 2, 16), ("zbv", 2, 16), ("zbv", 2, 4), ("dualpipev", 2, 16)],
)
def test_a_pipeline_idles_as_the_run_spec_says(schedule: Schedule, vpp: int, batch: int) -> None:
    layout = Layout(pp=4, vpp=vpp, schedule=schedule)
    step = time_of(Work(resolve_model("llama3-8b", ["vocab_size=64"]), 8192, batch), layout, "4xH100")
    share, _ = bubble(ParallelSpec(pp=4, vpp=vpp, schedule=schedule, micro_batch=1), batch)
    passes = step.total - sum(step.terms[name] for name in ("gradients", "optimiser", "outside", "waiting"))
    assert step.terms["bubble"] / passes == pytest.approx(share, rel=0.02)


def test_experts_that_are_not_split_need_no_sums_over_tensor_parallel_ranks() -> None:
    work = Work(resolve_model("mixtral-8x7b"), 4096, 64)
    split, whole = (time_of(work, Layout(tp=4, ep=4, dp=8, etp=etp, sp=True), "32xH100", "megatron") for etp in (4, 1))
    assert whole.terms["tensor"] < 0.5 * split.terms["tensor"]


def test_8_bits_halve_the_backward_matmuls_of_our_head_alone() -> None:
    known, gpu = calibration(), find_gpu("H200")
    model, layout = resolve_model("llama3-1b"), Layout(micro_batch=8)

    def seconds(precision: str, stack: str = "argosy", losses: int = 0) -> float:
        work = Work(model, 4096, 8, precision=precision, sample_losses=losses)
        rates = known.rates(gpu, known.stacks[stack], precision)
        return head_seconds(work, layout, known.stacks[stack], rates, 8 * 4096)

    # Measured: 24.0 to 12.0 ms and 24.8 to 15.0 ms.
    assert seconds("bf16") - seconds("fp8") == pytest.approx(0.0218, rel=0.15)
    assert seconds("fp8", losses=2) == seconds("bf16")
    assert seconds("fp8", "megatron") == seconds("bf16", "megatron")


def test_gradients_added_apart_from_their_product_cost_every_micro_batch() -> None:
    work = Work(resolve_model("llama2-7b"), 4096, 64)

    def added(size: int, stack: str, **axes: int) -> float:
        layout = Layout(**{"dp": 8, "micro_batch": size, **axes})
        return time_of(work, layout, "8xH100", stack).terms["accumulation"]

    assert 0 < added(1, "torch") == pytest.approx(2 * added(2, "torch"))
    # Our matmuls accumulate too. Where FSDP keeps weights gathered it is not measured, and not counted on.
    assert added(1, "argosy") == added(1, "argosy", dp=1, tp=8) == 0
    gathered = {"pp": 2, "dp": 4, "zero": 3}
    assert 0 < added(1, "argosy", **gathered) == pytest.approx(2 * added(2, "argosy", **gathered))
    # One micro-batch needs no gradient accumulation.
    assert time_of(work, Layout(dp=8, micro_batch=8), "8xH100").terms["accumulation"] == 0
    # Megatron's matmuls accumulate.
    assert time_of(work, Layout(dp=8), "8xH100", "megatron").terms["accumulation"] == 0
    # ZeRO-3 reduces gradients to a shard first.
    assert time_of(work, Layout(dp=8, zero=3), "8xH100").terms["accumulation"] == 0


def test_zero_3_costs_its_copies_even_if_nothing_is_gathered_slowly() -> None:
    work = Work(resolve_model("llama2-7b"), 4096, 64)
    known, cluster, layout = calibration(), parse_cluster("8xH100"), Layout(dp=8, zero=3, micro_batch=8)
    stack = known.stacks["argosy"]
    copies = stack.copied * layer_parameters(work, layout) / known.rates(cluster.gpu, stack, "bf16").memory
    alone = micro_batch_time(work, layout, cluster, stack, known, alone=True)
    assert alone.layer["slowdown"] == pytest.approx(copies)
    # A gather less; and adapters beside weights that have no gradients.
    adapted = replace(work, model=resolve_model("llama2-7b", ["lora={rank: 8}"]))
    for cheaper in (replace(work, reshard=False), adapted):
        assert micro_batch_time(cheaper, layout, cluster, stack, known, alone=True).layer["slowdown"] < copies
    # What the copies of the ends take is not lost.
    without = micro_batch_time(work, layout, cluster, stack.model_copy(update={"ends": False}), known, alone=True)
    assert (without.embedding, alone.embedding > 0, alone.head > without.head) == (0, True, True)


def test_pieces_of_the_queries_are_slower_and_no_faster_than_the_gpu_is_said_to_be() -> None:
    known, gpu = calibration(), find_gpu("H100")
    stack = known.stacks["argosy"]
    rates = known.rates(gpu, stack, "bf16")
    assert rates.pieces < rates.attention
    slow = known.model_copy(update={"constants": {**known.constants, "attention.H100": 0.2}})
    measured = slow.rates(gpu, stack, "bf16")
    assert measured.pieces == measured.attention < rates.pieces
    work = Work(resolve_model("llama3-8b"), 32768, 8)
    whole, cut = (time_of(work, layout, "8xH100").terms["attention"] for layout in (Layout(tp=8), Layout(tp=4, cp=2)))
    assert cut == pytest.approx(whole * rates.attention / rates.pieces)


def test_the_host_of_an_expert_parallel_rank_has_more_to_launch() -> None:
    work = Work(resolve_model("qwen3-30b-a3b"), 4096, 64)
    apart, together = (time_of(work, Layout(dp=16, zero=3, ep=ep), "16xH100").terms["launches"] for ep in (8, 1))
    assert apart > together


def test_a_stack_that_hides_the_backward_reduction_waits_less_for_tensor_parallelism() -> None:
    work = Work(resolve_model("gpt3-18.4b"), 2048, 64)
    apart, hidden = (
        time_of(work, Layout(tp=8, micro_batch=4), "1xp4de.24xlarge", stack).terms["tensor"]
        for stack in ("megatron-2021", "megatron-2022")
    )
    assert 0.5 * apart < hidden < apart


def test_a_width_that_fills_no_tiles_wastes_the_device() -> None:
    assert efficiency(4096, 13824, 12288, 108) > 1.1 * efficiency(256, 13825, 12288, 108)
    assert efficiency(64, 64, 4096, 108) < 0.02
    # Split-K.
    assert efficiency(512, 512, 32768, 132, parts=4) > 2 * efficiency(512, 512, 32768, 132)


@given(rows=st.integers(1, 20_000), columns=st.integers(1, 20_000), inner=st.integers(1, 20_000))
def test_no_product_is_faster_than_the_device(rows: int, columns: int, inner: int) -> None:
    assert 0 < efficiency(rows, columns, inner, 132) <= 1


def test_groups_use_the_links_they_have() -> None:
    cluster = parse_cluster("4xDGX-H100")
    layout = Layout(tp=4, dp=4, pp=2)
    assert not group(layout, "tp", cluster).crosses
    assert group(layout, "dp", cluster).near == 2
    assert group(layout, "pp", cluster).crosses


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_full_recompute_and_deeper_pipelines_cost_time(tp: int, micro_batch: int, recompute: str) -> None:
    work = Work(resolve_model("llama2-7b"), 4096, 64)
    layout = Layout(tp=tp, dp=8 // tp, micro_batch=micro_batch, recompute=recompute)  # type: ignore[arg-type]
    here = time_of(work, layout, "8xH100").total
    assert here <= time_of(work, replace(layout, recompute="full"), "8xH100").total
    assert time_of(work, layout, "8xH100").exposed < 1


def test_constants_are_few_and_belong_to_no_source() -> None:
    known = calibration()
    assert len(known.constants) < 30
    assert not [name for name in known.constants if any(stack in name for stack in known.stacks)]


def test_widths_that_begin_no_line_of_memory_are_slower() -> None:
    def products(hidden: int, heads: int) -> float:
        sizes = [f"hidden={hidden}", f"heads={heads}", f"ffn={4 * hidden}", "layers=8"]
        work = Work(resolve_model("gpt2", sizes), 2048, 64)
        return time_of(work, Layout(tp=8, micro_batch=2), "8xA100-80").terms["products"]

    assert products(14400, 96) > 1.3 * products(14336, 64)


def test_a_token_goes_once_to_a_rank_with_several_of_its_experts() -> None:
    work, layout = Work(resolve_model("moe-3.5b-a1.1b"), 4096, 64), Layout(ep=8, dp=8)
    known = calibration()
    stack = known.stacks["megatron"]
    once = stack.model_copy(update={"routes_once": True})
    each, fewer = (step_time(work, layout, parse_cluster("8xH100"), s, known).terms["experts"] for s in (stack, once))
    assert fewer < each


def test_a_board_that_may_draw_less_is_slower() -> None:
    known = calibration()
    stack = known.stacks["argosy"]
    full, less = (known.rates(find_gpu(name), stack, "bf16").product for name in ("H100", "H100-96"))
    assert less < full < find_gpu("H100").peak() * 1e12


def test_attention_written_for_ampere_leaves_hopper_half_idle() -> None:
    known = calibration()
    old = known.stacks["argosy"].model_copy(update={"attention": "flash"})
    ampere, hopper = (known.rates(find_gpu(name), old, "bf16").attention for name in ("A100-80", "H100"))
    assert hopper / ampere == pytest.approx(989 / 312 / 2)
    assert known.rates(find_gpu("H100"), known.stacks["argosy"], "bf16").attention > 2 * hopper


def test_muon_takes_its_iterations_and_keeps_less(tmp_path: Path) -> None:
    """The plan knows the optimiser: with Muon the same run has a longer step, less optimiser state and a smaller checkpoint."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama3-8b\ndata: {train: synthetic, seq_len: 4096}\ntrain: {global_batch: 64, steps: 100}\noptim: {lr: 1e-4}\n"
        "parallel: {dp_shard: 16, micro_batch: 1, recompute: full}\n"
    )
    plans = [
        predict(resolve(path, [f"optim.name={name}"]).spec, parse_cluster("2xp5.48xlarge"))
        for name in ("adamw", "muon")
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    adamw, muon = plans
    assert muon["terms_s"]["optimiser"] > 2 * adamw["terms_s"]["optimiser"]
    assert muon["memory_gib"][0]["optimiser"] < 0.65 * adamw["memory_gib"][0]["optimiser"]
    assert muon["checkpoint_gb"] < 0.8 * adamw["checkpoint_gb"]
    more = predict(resolve(path, ["optim.name=muon", "optim.muon.ns_steps=10"]).spec, parse_cluster("2xp5.48xlarge"))
    assert more is not None
    assert more["terms_s"]["optimiser"] > 1.5 * muon["terms_s"]["optimiser"]


def test_lion_keeps_one_tensor_and_moves_fewer_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama3-8b\ndata: {train: synthetic, seq_len: 4096}\ntrain: {global_batch: 64, steps: 100}\noptim: {lr: 1e-4}\n"
        "parallel: {dp_shard: 16, micro_batch: 1, recompute: full}\n"
    )
    plans = [
        predict(resolve(path, [f"optim.name={name}"]).spec, parse_cluster("2xp5.48xlarge"))
        for name in ("adamw", "lion")
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    adamw, lion = plans
    assert lion["checkpoint_gb"] == pytest.approx(adamw["checkpoint_gb"] * 8 / 12, rel=1e-3)
    assert lion["memory_gib"][0]["optimiser"] == pytest.approx(adamw["memory_gib"][0]["optimiser"] / 2, rel=1e-3)
    assert lion["terms_s"]["optimiser"] < adamw["terms_s"]["optimiser"]


def test_newton_schulz_has_the_products_of_its_formula() -> None:
    """An iteration computes X X^T, its square, and the result times X: 4 m^2 n + 2 m^3 FLOPs at the rate of large matmuls."""
    rates = Rates(sms=132, product=6e14, narrow=6e14, attention=3e14, pieces=3e14, memory=1e20)
    cluster = parse_cluster("1xH100")
    links = calibration().links(cluster)
    rank = UpdatingRank(Work(resolve_model("gpt2"), 1024, 8), Layout(), cluster, links, rates, layers=1)
    rows, columns = 4096, 14336
    flops = 5 * (4 * rows**2 * columns + 2 * rows**3)
    assert newton_schulz_seconds(rank, columns, rows, 5) == pytest.approx(flops / rates.product, rel=0.1)


@pytest.mark.parametrize(
    ("override", "term"),
    [("parallel.reduce=bf16", "gradients"), ("parallel.reshard=false", "slowdown"), ("train.precision=fp32", "memory")],
)
def test_keys_of_a_run_spec_that_change_time_or_memory_are_read(override: str, term: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama3-8b\ndata: {train: synthetic, seq_len: 4096}\ntrain: {global_batch: 64, steps: 100}\noptim: {lr: 1e-4}\n"
        "parallel: {dp_shard: 16, micro_batch: 1}\n"
    )
    copies = ["parallel.dp_shard=1", "parallel.dp_replicate=16"] if term == "gradients" else []
    plain, other = (
        predict(resolve(path, [*copies, *more]).spec, parse_cluster("2xp5.48xlarge")) for more in ([], [override])
    )
    assert plain is not None
    assert other is not None
    if term == "memory":
        assert other["memory_gib"][0]["activations"] == pytest.approx(
            2 * plain["memory_gib"][0]["activations"], rel=0.01
        )
        assert any("fp32" in warning for warning in other["warnings"])
    else:
        assert other["terms_s"][term] < plain["terms_s"][term]


def test_a_batch_that_grows_has_fewer_tokens(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: gpt2\ndata: {train: synthetic, seq_len: 1024}\noptim: {lr: 1e-4}\n"
        "train: {global_batch: 64, steps: 50000, batch_rampup: {start: 16, increment: 16, samples: 960000}}\n"
    )
    plan = predict(resolve(path).spec, parse_cluster("1xH100"))
    full = predict(resolve(path, ["train.batch_rampup=null"]).spec, parse_cluster("1xH100"))
    assert plan is not None
    assert full is not None
    assert plan["days"] < full["days"]


@pytest.mark.parametrize("micros", [1, 2, 4, 8])
def test_an_interleaved_pipeline_with_few_micro_batches_waits_as_the_run_says(micros: int) -> None:
    layout = Layout(pp=4, vpp=2, schedule="interleaved-1f1b")
    seconds = bubble_seconds(layout, micros, [1.0] * 4)
    parallel = ParallelSpec(pp=4, vpp=2, schedule="interleaved-1f1b", micro_batch=1)
    assert seconds / (seconds + micros) == pytest.approx(bubble(parallel, micros)[0])

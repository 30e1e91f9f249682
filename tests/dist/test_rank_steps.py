"""One rank of a job runs its step on this machine, without the others: every axis and schedule, and what it holds."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from argosy.cli.bench import bench
from argosy.cli.plan import plan as argosy_plan
from argosy.compat.absent_peers import fake_ranks
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.synthetic import synthetic_batch
from argosy.errors import ArgosyError
from argosy.measure import rank_steps, rehearsed_job
from argosy.measure.device_clock import DeviceTime
from argosy.measure.rank_steps import ALL_STAGES, Effort, RankStep, effort_of, ranks_asked, run_rank, stage_of
from argosy.measure.rehearsed_job import RankRow, rehearse_job
from argosy.parallel.mesh import Mesh, make_mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.pipeline.stage_messages import Form, Mail
from argosy.parallel.pipeline.stream_forms import StreamForms
from argosy.parallel.shards import local
from argosy.plan.hardware import parse_cluster
from argosy.plan.measured_plan import RankPlan, Seconds, read_measured, with_graphs
from argosy.plan.time import step_time
from argosy.train.optimizer import Optimizer
from dist.pool import Pool
from dist.training import spec_of

CPU = torch.device("cpu")
EVERY_AXIS = "pp=4 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=2 train.global_batch=32 micro_batch=4"
LAYOUTS = [
    ("moe", EVERY_AXIS),
    ("gpt", "pp=2 tp=2 schedule=gpipe micro_batch=8"),
    ("gpt", "pp=2 dp_shard=2 schedule=interleaved-1f1b micro_batch=4"),
    ("gpt", "pp=2 cp=2 schedule=zbv micro_batch=8"),
    ("moe", "pp=2 dp_shard=2 ep=2 schedule=dualpipev micro_batch=2"),
    ("llama", "dp_replicate=2 dp_shard=2 tp=2 cp=2 cp_kind=ulysses recompute=full model.layers=2"),
    ("llama", "dp_shard=2 optim.name=muon model.layers=2 micro_batch=8"),
]


def ends_and_middle(spec: RunSpec) -> list[int]:
    """Ranks of the first, a middle and the last stage. The middle one has a place other than the first along every axis."""
    ranks = ranks_asked(spec, ALL_STAGES)
    inside = spec.parallel.world_size // spec.parallel.pp
    return sorted({ranks[0], ranks[len(ranks) // 2] + inside - 1, ranks[-1]})


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_a_rank_runs_its_step_without_its_peers(model: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, norms = spec_of(model, layout), list[float]()
    take_step = rank_steps.take_step

    def noting(*arguments: Any, **named: Any) -> Any:
        taken = take_step(*arguments, **named)
        norms.append(float(taken.grad_norm))
        return taken

    monkeypatch.setattr(rank_steps, "take_step", noting)
    whole = spec.train.global_batch // (spec.parallel.micro_batch * spec.parallel.data_parallel)
    for rank in ends_and_middle(spec):
        found = run_rank(spec, rank, Effort(steps=1, warmup=0, micro_batches=whole), CPU)
        assert (found.rank, found.stage) == (rank, stage_of(spec, rank))
        assert found.compute.passes > 0 < found.compute.update
        assert found.parameters > 0
    # Whatever peers would have sent, the numbers stay ordinary: kernels take another time for NaNs.
    assert all(map(math.isfinite, norms))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama", "pp=2 tp=2 train.precision=bf16 micro_batch=8"), ("t5", "pp=4 tp=2 sp=false micro_batch=8")],
)
def test_a_stage_sends_the_forms_that_the_next_one_expects(
    model: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, expected = list[list[Form]](), list[list[Form]]()
    send, leaving = Mail.send, StreamForms.leaving

    def sending(mail: Mail, tensors: Any, to: int) -> Any:
        if to > dist.get_rank() // 2:
            sent.append([Form(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        return send(mail, tensors, to)

    def asked(forms: StreamForms, *arguments: Any) -> Any:
        expected.append(leaving(forms, *arguments))
        return expected[-1]

    monkeypatch.setattr(Mail, "send", sending)
    monkeypatch.setattr(StreamForms, "leaving", asked)
    spec = spec_of(model, layout)
    for rank in ranks_asked(spec, ALL_STAGES):
        run_rank(spec, rank, Effort(steps=1, warmup=0, micro_batches=2), CPU)
    assert sent == expected != []


def held_bytes(model: str, layout: str) -> list[int]:
    """Bytes of parameters, gradients and optimiser state of this rank after a backward pass."""
    spec = spec_of(model, layout)
    return counted(spec, make_mesh(spec.parallel, CPU))


def counted(spec: RunSpec, mesh: Mesh) -> list[int]:
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    with torch.no_grad():
        for weight in optimizer.weights().values():
            local(weight).normal_(0, 0.02)
    samples = spec.train.global_batch // spec.parallel.data_parallel
    engine.forward_backward(synthetic_batch(spec, samples), 1)
    parameters = list(engine.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert gradients
    state = [*optimizer.weights().values(), *optimizer.tensors().values()]
    return [sum(local(t).numel() * t.element_size() for t in kept) for kept in (parameters, gradients, state)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [("moe", "dp_shard=2 tp=2 ep=2 model.layers=2 micro_batch=8"), ("gpt", "pp=2 tp=2 micro_batch=8")],
)
def test_a_rank_without_peers_holds_what_the_same_rank_of_a_real_job_holds(pool: Pool, model: str, layout: str) -> None:
    spec = spec_of(model, layout)
    real = pool.run(4, held_bytes, model, layout)
    for rank in (0, 3):
        with fake_ranks(rank, 4):
            assert counted(spec, make_mesh(spec.parallel, CPU)) == pytest.approx(real[rank], rel=0.03)


def test_a_peer_sends_what_this_rank_sends() -> None:
    before = dist.all_to_all_single
    with fake_ranks(1, 4):
        gathered = torch.arange(8.0)
        dist.all_gather_into_tensor(gathered, gathered[2:4], async_op=True).wait()  # type: ignore[union-attr]
        assert gathered.tolist() == [2.0, 3.0] * 4
        dist.all_gather_into_tensor(gathered, torch.tensor([5.0, 6.0]))
        assert gathered.tolist() == [5.0, 6.0] * 4
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(8.0))
        assert part.tolist() == [2.0, 3.0]
        swapped = torch.empty(6)
        dist.all_to_all_single(swapped, torch.arange(6.0), [3, 1, 1, 1], [3, 1, 1, 1])
        assert swapped.tolist() == [0, 1, 2, 3, 4, 5]
    assert dist.all_to_all_single is before


def test_a_rank_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("llama", "pp=2 dp_shard=2")
    monkeypatch.setattr(rank_steps, "memory_of", lambda device: 2**10)
    monkeypatch.setattr(rehearsed_job, "run_ranks", lambda *arguments: pytest.fail("a rank was built"))
    with pytest.raises(ArgosyError, match=r"rank 0 \(stage 0 of 2\) would need .* GiB by the planner's count") as error:
        rehearse_job(spec, 4, "0", steps=1, warmup=1)
    assert error.value.code == "device.out-of-memory"
    assert "--ignore-memory" in str(error.value.fix)


def test_fewer_micro_batches_are_run_only_if_they_reach_the_memory_of_the_step() -> None:
    spec = spec_of("gpt", "pp=4 micro_batch=1")
    plan = RankPlan.of(spec, "fp32")
    with pytest.raises(ArgosyError, match="holds 4 of the 16 micro-batches of a step at once"):
        effort_of(spec, plan, steps=1, warmup=1, micro_batches=3)
    assert effort_of(spec, plan, steps=1, warmup=1, micro_batches=4).micro_batches == 4
    assert effort_of(spec, plan, steps=1, warmup=1, micro_batches=99).micro_batches == 16
    piped = spec_of("gpt", "pp=4 micro_batch=1 schedule=gpipe")
    with pytest.raises(ArgosyError, match="holds 16 of the 16"):
        effort_of(piped, RankPlan.of(piped, "fp32"), steps=1, warmup=1, micro_batches=8)


def test_a_rank_outside_of_the_job_is_refused() -> None:
    with pytest.raises(ArgosyError, match="the ranks of this layout are 0 to 3"):
        ranks_asked(spec_of("gpt", "dp_shard=4"), "4")


@pytest.mark.parametrize(
    ("model", "layout"), [("moe", "pp=2 dp_shard=2 tp=2 cp=2 ep=2"), ("gpt", "dp_shard=8 tp=2 optim.name=muon")]
)
def test_a_plan_measured_as_predicted_is_the_plan(model: str, layout: str) -> None:
    """Compute replaces compute: nothing is counted twice, nothing is lost."""
    spec = spec_of(model, layout)
    plan, cluster = RankPlan.of(spec, "bf16"), parse_cluster("2xp5.48xlarge")
    expected = step_time(plan.work, plan.layout, cluster, plan.stack, plan.known)
    measured = {stage: plan.compute(stage, cluster, launches=True) for stage in range(plan.layout.pp)}
    assert plan.step(measured, cluster).total == pytest.approx(expected.total, rel=1e-6)
    # The stage that was not measured is as much slower as the one that was.
    slower = Seconds(2 * measured[0].passes, measured[0].update)
    found = plan.step({0: slower}, cluster)
    assert found.passes == pytest.approx(2 * max(seconds.passes for seconds in measured.values()))
    assert found.communication == pytest.approx(plan.step(measured, cluster).communication)
    assert replace(found, passes=0.0).total < found.total


def test_the_time_of_a_device_is_told_by_phase() -> None:
    x, computing = torch.randn(400, 400), DeviceTime(CPU)
    for name, products in (("forward_backward", 20), ("optimizer", 0), ("forward_backward", 20)):
        computing.mark(name)
        for _ in range(products):
            torch.mm(x, x)
        time.sleep(0.01)
    computing.end()
    computing.end()
    assert computing.seconds["forward_backward"] > 0 == computing.seconds["optimizer"]
    assert rank_steps._computed(computing.seconds, 3.0) == Seconds(
        3 * computing.seconds["forward_backward"], computing.seconds["optimizer"]
    )
    assert rank_steps._computed({}, 3.0) is None


def test_a_gpu_that_waits_for_its_host_is_told() -> None:
    elapsed, nothing = Seconds(1.0, 0.1), cast("Any", None)
    steps = [RankStep(rank, 0, 1, elapsed, Seconds(busy, 0.1), nothing, False) for rank, busy in ((0, 1.0), (7, 0.5))]
    rows = [RankRow(step, elapsed, nothing, on_gpu=True) for step in steps]
    assert rows[0].waiting == 0
    assert rows[1].compute_error == pytest.approx(1.1 / 0.6 - 1)
    assert rehearsed_job._waits(rows[:1], can_capture=True) == []
    [line] = rehearsed_job._waits(rows, can_capture=False)
    assert rehearsed_job._waits(rows, can_capture=True) == [
        f"{line}, and parallel.graph=on launches all kernels of a pass at once"
    ]
    assert "45% of the step of rank 7" in line


@pytest.mark.parametrize(
    ("cluster", "can_capture", "asked", "replayed"),
    [
        ("8xp5.48xlarge", True, "auto", True), ("8xp5.48xlarge", False, "auto", False), ("64xg5.8xlarge", True, "auto", False),
        ("64xg5.8xlarge", True, "on", True),
    ],
)  # fmt: skip
def test_a_job_is_measured_and_planned_with_the_passes_that_it_would_run(
    cluster: str, can_capture: bool, asked: str, replayed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the clock it would always be graphs: where collectives move nothing, sums of gradients after a replayed pass take no time."""
    launches = {"on": 0.05, "off": 0.2}
    memory: Any = SimpleNamespace(peak=1.0, as_dict=lambda: {"peak": 1.0})

    def run(spec: RunSpec, ranks: list[int], *others: object) -> list[RankStep]:
        assert spec.parallel.graph in launches
        graph = spec.parallel.graph if can_capture else "off"
        return [RankStep(0, 0, 1, Seconds(launches[graph], 0.01), None, memory, graph == "on")]

    monkeypatch.setattr(rehearsed_job, "run_ranks", run)
    keys = [
        "model=gpt2-large",
        "data.train=synthetic",
        "data.seq_len=1024",
        "train.global_batch=64",
        "train.steps=9",
        "optim.lr=1e-3",
    ]
    keys += ["parallel.dp_replicate=64", "parallel.micro_batch=1", "train.precision=bf16", f"parallel.graph={asked}"]
    spec = resolve(None, keys).spec
    job = rehearse_job(spec, 64, "0", steps=1, warmup=1, cluster=cluster, ignore_memory=True)
    assert job.replayed == replayed
    assert ("as CUDA graphs" in job.lines()[1]) == replayed
    exposed = {graph: RankPlan.of(with_graphs(spec, graph), "bf16") for graph in (True, False)}
    expected = exposed[replayed].step({0: Seconds(launches["on" if replayed else "off"], 0.01)}, parse_cluster(cluster))
    assert job.step == expected
    written = tmp_path / "job.json"
    written.write_text(json.dumps(job.as_dict()))
    assert read_measured(written, spec, parse_cluster(cluster)).step == expected
    communication = [
        exposed[graph].step({0: Seconds(0.1, 0.01)}, parse_cluster(cluster)).communication for graph in (True, False)
    ]
    assert communication[0] > communication[1]


def test_one_rank_of_each_stage_of_a_job_and_the_step_that_follows(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec(parallel={"pp": 2, "dp_shard": 4, "micro_batch": 1})
    asked: dict[str, Any] = {"world_size": 8, "batch": 8, "steps": 1, "cluster": "8xH100"}
    bench(str(path), rank="all-stages", as_json=True, **asked)
    found = json.loads(capsys.readouterr().out)
    assert [(rank["rank"], rank["stage"]) for rank in found["ranks"]] == [(0, 0), (4, 1)]
    assert (found["micro_batches"], found["micro_batches_run"]) == (2, 2)
    plan = found["plan"]
    # What was measured is in the step as it was measured, and the rest is said to be predicted.
    assert plan["measured_s"]["passes"] in [rank["measured"]["passes_s"] for rank in found["ranks"]]
    assert plan["step_s"] == pytest.approx(
        sum(plan["measured_s"].values()) + sum(plan["predicted_s"].values()), abs=1e-5
    )
    # A CPU is no GPU of the planner: nothing is compared.
    assert found["ranks"][0]["compute_error"] is None
    written = path.with_name("job.json")
    written.write_text(json.dumps(found))
    spec, cluster = resolve(path, ["train.global_batch=8"]).spec, parse_cluster("8xH100")
    assert read_measured(written, spec, cluster).step.total == pytest.approx(plan["step_s"], abs=1e-5)
    with pytest.raises(ArgosyError, match="measured with global_batch 8 and not 16"):
        read_measured(written, resolve(path, ["train.global_batch=16"]).spec, cluster)
    # A micro-batch that the spec leaves open is the one that was measured.
    without = resolve(path, ["train.global_batch=8", "parallel={pp: 2, dp_shard: 4}"]).spec
    assert without.parallel.micro_batch == 2
    with pytest.raises(ArgosyError, match="measured with micro_batches 2 and not 1"):
        read_measured(written, without, cluster)
    measured = read_measured(written, without, cluster, has_open_micro_batch=True)
    assert measured.step.total == pytest.approx(plan["step_s"], abs=1e-5)
    argosy_plan(str(path), ["train.global_batch=8"], cluster=["8xH100"], measured=written, as_json=True)
    assert json.loads(capsys.readouterr().out)["measured"]["step_s"] == pytest.approx(plan["step_s"], abs=1e-5)
    with pytest.raises(ArgosyError, match="--measured plans a layout that was measured, on one cluster"):
        argosy_plan(str(path), cluster=["8xH100", "16xH100"], measured=written)
    bench(str(path), rank="7", **asked)
    told = capsys.readouterr().out
    assert "measured   compute and memory, here" in told
    assert "predicted  communication by the planner, for 8xH100" in told

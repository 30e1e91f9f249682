"""The question and the answer of `argosy plan`: a model on a cluster, and its best layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, gcd
from pathlib import Path
from typing import Any, get_args

from argosy.config.counts import count_parameters, least_state_bytes
from argosy.config.overrides import Override
from argosy.config.refusals import did_you_mean
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.config.units import parse_count
from argosy.errors import ArgosyError
from argosy.plan.calibration import calibration
from argosy.plan.hardware import GIB, Cluster, parse_cluster
from argosy.plan.layouts import Layout, Recompute, Schedule, Work, parallel_keys, violations
from argosy.plan.log import Log, judge
from argosy.plan.plan_report import LEGEND, MEAN_ERROR, as_dict, distinct, explain, header, table, why_lost
from argosy.plan.search import Candidate, Found, evaluate, micro_batches, search, warnings
from argosy.tasks.task_registry import masks_vary

STACK = "argosy"
CHOICES: dict[str, tuple[str, ...]] = {"recompute": get_args(Recompute), "schedule": get_args(Schedule)}
DEFAULT_CLUSTER = "1xH100"
# The share of GPU memory that weights, gradients and optimiser state of a fully sharded model may take.
FOR_STATE = 0.8
# Tokens in a step if no batch is given.
DEFAULT_TOKENS = 2**20
# Tokens of a run per parameter that a token uses, if no length is given.
CHINCHILLA = 20


@dataclass(frozen=True)
class Question:
    """The input of the planner.

    `tokens` is the length of the run, which `length_from` says the origin of, and `fixed` has the axes a user holds (`--what-if`).
    `asked` is the run spec's own layout, if its world size is the cluster's. `offers_narrow`: the user chose no precision, so the
    plan also reports fp8. `spot` is the price of preemptible nodes as a share of the on-demand price.
    """

    work: Work
    cluster: Cluster
    tokens: int | None
    fixed: dict[str, object]
    asked: Layout | None
    offers_narrow: bool = False
    length_from: str = ""
    spot: float | None = None
    # GPUs of the run spec's layout, if it is for more than one and for another number than the cluster has.
    asked_gpus: int | None = None

    @classmethod
    def read(
        cls, target: str | Mapping[str, Any], overrides: Sequence[Override], *, cluster: str | None, global_batch: int | None,
        seq_len: int | None, tokens: str | None, precision: str | None, what_if: str | None, price: float | None,
        hardware: str | None, spot: float | None = None,
    ) -> Question:  # fmt: skip
        """Read a question. `target` is the path of a run.yaml, its keys as a dict, or the name of a preset."""
        total, length_from = (None, "") if tokens is None else (_count(tokens), "--tokens")
        spec = None
        if not isinstance(target, str) or target.endswith((".yaml", ".yml")) or Path(target).is_file():
            spec = resolve(Path(target) if isinstance(target, str) else target, overrides, elsewhere=True).spec
            work = _work_of(spec, global_batch, seq_len, precision)
            if total is None:
                total, length_from = _tokens_of(spec), "the run spec's length"
        else:
            model = resolve_model(target, overrides)
            length = seq_len or model.max_seq_len
            work = Work(model, length, global_batch or max(1, DEFAULT_TOKENS // length), _precision(precision))
        if total is None:
            total, length_from = (
                CHINCHILLA * count_parameters(work.model).active,
                "Chinchilla's 20 a parameter; --tokens sets another",
            )
        nodes = parse_cluster(cluster or _own_cluster(spec), price=price, user_file=hardware)
        if spot is not None and nodes.price is not None:
            nodes = replace(nodes, price=nodes.price * spot)
        if work.precision not in ("bf16", "fp32") and work.precision not in nodes.gpu.dense:
            raise _no_such_precision(work.precision, nodes)
        return cls(
            work, nodes, total, _fixed(what_if), None if spec is None else _asked(spec.parallel, nodes),
            offers_narrow=precision is None and work.precision == "bf16", length_from=length_from, spot=spot,
            asked_gpus=None if spec is None or spec.parallel.world_size in (1, nodes.gpus) else spec.parallel.world_size,
        )  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """The answer of the planner.

    `asked` is the run spec's own layout. `storage` is the write bandwidth for checkpoints in GB/s. `narrow` is the best layout with
    fp8 matmuls, if the GPU has them and the user chose no precision. `log` is a training log to compare with the plan.
    """

    question: Question
    found: Found
    shown: tuple[Candidate, ...]
    asked: Candidate | None
    storage: float
    narrow: Candidate | None = None
    log: Log | None = None

    def _offer(self, narrow: Candidate) -> str:
        share = narrow.time.total / self.shown[0].time.total
        return (
            f"fp8 matmuls would take {share:.0%} of the first layout's time and {narrow.fullest.device:.1f} GiB; they change the "
            "numerics, so choose them with --precision fp8"
        )

    def lines(self, *, explained: bool = False) -> list[str]:
        best, tokens = self.shown[0], self.question.tokens
        length_from, spot = self.question.length_from, self.question.spot
        lines = [*header(best, self.found, tokens, self.storage, length_from=length_from, spot=spot), ""]
        lines += [*table(self.shown, tokens), *LEGEND]
        if len(self.shown) > 1:
            lines += ["", "why the others lost, against the first:"]
            lines += [f"  {why_lost(best, other)}" for other in self.shown[1:4]]
        if self.asked is not None:
            fits = "" if self.asked.fits else f", which does not fit in {best.cluster.gpu.memory:g} GiB"
            lines += ["", "the run spec's own layout" + fits + ":", *table([self.asked], tokens)]
            lines += [f"  {why_lost(best, self.asked)}"]
            lines += [f"  warning: {warning}" for warning in warnings(self.asked)]
        if (gpus := self.question.asked_gpus) is not None:
            lines += ["", f"the run spec's own layout is for {gpus} GPUs, and this cluster has {best.cluster.gpus}"]
        lines += [f"warning: {warning}" for warning in warnings(best)]
        lines += [] if self.narrow is None else [self._offer(self.narrow)]
        if self.log is not None:
            lines += ["", "the log:", *(f"  {line}" for line in judge(self.log, best))]
        if explained:
            lines += ["", *explain(best)]
        keys = parallel_keys(best.layout)
        return [
            *lines,
            "",
            "for the run spec, or the command line of `argosy train` and `launch`:",
            "parallel: {" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}",
            " ".join(f"parallel.{key}={value}" for key, value in keys.items()),
        ]

    def as_dict(self) -> dict[str, Any]:
        question = self.question
        return {
            "model": question.work.model.preset or question.work.model.family,
            "cluster": question.cluster.name,
            "gpus": question.cluster.gpus,
            "global_batch": question.work.global_batch,
            "seq_len": question.work.seq_len,
            "tokens": question.tokens,
            "tokens_from": question.length_from,
            "mean_error": MEAN_ERROR,
            "considered": self.found.considered,
            "left_out": dict(self.found.left_out),
            "plans": [as_dict(candidate, question.tokens) for candidate in self.shown],
            "asked": None if self.asked is None else as_dict(self.asked, question.tokens),
            "fp8": None if self.narrow is None else as_dict(self.narrow, question.tokens),
            "log": None if self.log is None else {**asdict(self.log), "says": list(judge(self.log, self.shown[0]))},
        }


def answer(
    question: Question, *, top: int = 8, storage: float = 2.0, log: Log | None = None, calibrated: str | None = None
) -> Advice:
    known = calibration(calibrated)
    stack = known.stacks[STACK]
    work, cluster = question.work, question.cluster
    found = search(work, cluster, stack, known, question.fixed)
    if not found.best:
        raise _nothing(question, found)
    asked = None if question.asked is None else evaluate(work, question.asked, cluster, stack, known)
    best, narrow = found.best[0], None
    if question.offers_narrow and "fp8" in cluster.gpu.dense:
        narrow = evaluate(replace(work, precision="fp8"), best.layout, cluster, stack, known)
    return Advice(question, found, tuple(distinct(found, top)), asked, storage, narrow, log)


def ranked_layouts(spec: RunSpec, cluster: str, fixed: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield the keys of `parallel` for a run on a cluster, best layout first. `fixed` has the axes that are already chosen."""
    question = Question(_work_of(spec, None, None, None), parse_cluster(cluster), _tokens_of(spec), fixed, None)
    return (parallel_keys(candidate.layout) for candidate in answer(question, top=1).found.best)


def ranked_micro_batches(spec: RunSpec, cluster: str) -> list[int]:
    """Return micro-batch sizes for a run with its own layout on a cluster, best first; none if its world size is another."""
    nodes, known = parse_cluster(cluster), calibration()
    layout = _asked(spec.parallel, nodes)
    if layout is None:
        return []
    # The size has to divide every batch of a ramp-up.
    batch = gcd(spec.train.global_batch, *(spec.train.batches.rampup or ())[:2])
    share, work = max(1, batch // layout.dp), _work_of(spec, None, None, None)
    found = micro_batches(work, layout, nodes, known.stacks[STACK], known, share)
    return [candidate.layout.micro_batch for candidate in found]


def predict(spec: RunSpec, cluster: str) -> dict[str, Any] | None:
    """Predict memory, time and cost of a run with its own layout, or None if its world size is not the cluster's."""
    nodes, known = parse_cluster(cluster), calibration()
    layout = _asked(spec.parallel, nodes)
    if layout is None:
        return None
    candidate = evaluate(_work_of(spec, None, None, None), layout, nodes, known.stacks[STACK], known)
    return as_dict(candidate, _tokens_of(spec)) | {"warnings": list(warnings(candidate))}


def _own_cluster(spec: RunSpec | None) -> str:
    """Return the cluster that the run spec names, or the default."""
    if spec is None or spec.cluster is None or spec.cluster.instance is None:
        return DEFAULT_CLUSTER
    return f"{spec.cluster.nodes}x{spec.cluster.instance}"


def _no_such_precision(precision: str, cluster: Cluster) -> ArgosyError:
    return ArgosyError(
        "plan.bad-question",
        f"{cluster.gpu.name} has no {precision} matmuls, only {', '.join(cluster.gpu.dense)}",
        key="--precision",
        value=precision,
        fix="use bf16, or GPUs that have it (Hopper, Ada, Blackwell)",
    )


def _nothing(question: Question, found: Found) -> ArgosyError:
    work, cluster = question.work, question.cluster
    if found.nearest is not None:
        need, state = found.nearest.fullest.device, least_state_bytes(work.model, work.rule) / GIB
        least = ceil(state / (FOR_STATE * cluster.gpu.memory))
        more = f"about {least:,} or more such GPUs" if least > cluster.gpus else "more GPUs"
        return ArgosyError(
            "plan.does-not-fit",
            f"none of {found.considered:,} layouts fits: the least memory is {need:.1f} GiB per GPU ({found.nearest.layout}), "
            f"and {cluster.gpu.name} has {cluster.gpu.memory:g}; weights, gradients and optimiser state are {state:,.0f} GiB in all",
            key="--cluster",
            value=cluster.name,
            fix=f"use {more}, GPUs with more memory, or shorter sequences",
        )
    why = "they do not divide"
    if question.fixed:
        tried = Layout(**question.fixed)  # type: ignore[arg-type]
        why = next(violations(work, tried, tried.gpus), f"no layout of {cluster.gpus} GPUs has these values")
    return ArgosyError(
        "plan.no-layout",
        f"no layout of {cluster.gpus} GPU{'s' if cluster.gpus > 1 else ''} can run {work.model.preset or work.model.family} with global_batch "
        f"{work.global_batch}: {why}",
        key="--global-batch" if not question.fixed else "--what-if",
        value=",".join(f"{axis}={value}" for axis, value in question.fixed.items()) or work.global_batch,
        fix="choose a batch that is a multiple of the number of GPUs"
        if not question.fixed
        else "fix other values, or fewer",
    )


def _work_of(spec: RunSpec, global_batch: int | None, seq_len: int | None, precision: str | None) -> Work:
    chosen = precision or ("bf16" if spec.train.precision == "auto" else spec.train.precision)
    return Work(
        spec.model, seq_len or spec.data.seq_len, global_batch or spec.train.global_batch, _precision(chosen),
        rule=spec.optim.rule,
        rule_keys=spec.optim.rule.settings(spec.optim),
        reduced=2.0 if spec.parallel.reduce == "bf16" else None,
        reshard=spec.parallel.reshard or spec.parallel.pp > 1,
        replayed=spec.parallel.graph == "auto" and spec.parallel.compile == "off" and not masks_vary(spec),
    )  # fmt: skip


def _tokens_of(spec: RunSpec) -> int | None:
    steps = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len)
    return None if steps is None else spec.train.batches.samples(steps) * spec.data.seq_len


def _asked(parallel: ParallelSpec, cluster: Cluster) -> Layout | None:
    if parallel.world_size != cluster.gpus:
        return None
    zero = 3 if parallel.dp_shard > 1 else 0
    return Layout(
        tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, cp=parallel.cp, ep=parallel.ep, dp=parallel.data_parallel, zero=zero,
        copies=parallel.dp_replicate if zero else 1,
        sp=parallel.tp > 1 and parallel.sp, micro_batch=parallel.micro_batch, recompute=parallel.recompute,
        schedule=None if parallel.pp == 1 else parallel.schedule,
    )  # fmt: skip


def _precision(asked: str | None) -> str:
    known = {None: "bf16", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp32": "fp32"}
    if asked not in known:
        raise ArgosyError(
            "plan.bad-question",
            f"{asked!r} is not a training precision",
            key="--precision",
            value=asked,
            fix="use bf16, fp16 or fp8",
        )
    return known[asked]


def _count(text: str) -> int:
    try:
        return int(parse_count(text))
    except (ValueError, TypeError) as error:
        raise ArgosyError("plan.bad-question", str(error), key="--tokens", value=text, fix="write it as 20B") from None


def _fixed(text: str | None) -> dict[str, object]:
    """Parse `tp=4,recompute=full` to values of a layout's fields."""
    # Argosy has no separate tensor parallelism for experts.
    axes = [*(field.name for field in fields(Layout) if field.name != "etp"), "dp_replicate", "dp_shard"]
    fixed: dict[str, object] = {}
    for part in [part for part in (text or "").replace(" ", ",").split(",") if part]:
        name, _, value = part.partition("=")
        if name not in axes or not value:
            hint = did_you_mean(name, axes) or f"axes are {', '.join(axes)}"
            raise ArgosyError(
                "plan.bad-question",
                f"{part!r} is not an axis and a value: {hint}",
                key="--what-if",
                value=text,
                fix="write tp=4",
            )
        if name == "sp":
            fixed[name] = value.lower() in ("1", "true", "yes")
        elif name in CHOICES:
            if value not in CHOICES[name]:
                raise ArgosyError(
                    "plan.bad-question",
                    f"{name} is one of {', '.join(CHOICES[name])}, not {value!r}",
                    key="--what-if",
                    value=text,
                    fix=f"write {name}={CHOICES[name][0]}",
                )
            fixed[name] = value
        elif value.isdigit():
            fixed[name] = int(value)
        else:
            raise ArgosyError(
                "plan.bad-question",
                f"{name} is a whole number, not {value!r}",
                key="--what-if",
                value=text,
                fix="write tp=4",
            )
    return _data_parallel(fixed)


def _data_parallel(fixed: dict[str, object]) -> dict[str, object]:
    """Replace the run spec's dp_replicate and dp_shard by the fields of a layout. One that is not given is 1, as in a run spec."""
    given = {key: fixed.pop(key) for key in ("dp_replicate", "dp_shard") if key in fixed}
    if not given:
        return fixed
    copies, shard = int(str(given.get("dp_replicate", 1))), int(str(given.get("dp_shard", 1)))
    return fixed | {"dp": copies * shard, "zero": 3 if shard > 1 else 0, "copies": copies if shard > 1 else 1}

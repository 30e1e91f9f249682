"""The question and the answer of `argosy plan`: a model on a cluster, and its best layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from argosy.config.counts import count_parameters
from argosy.config.default_micro_batch import (
    is_micro_batch_open,
    planner_chooses,
)
from argosy.config.fp8_rules import has_fp8_layers, sequence_lengths
from argosy.config.origins import Origins
from argosy.config.overrides import Override
from argosy.config.resolve import Resolved, resolve, resolve_model
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.config.units import parse_count
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.plan.calibration import calibration
from argosy.plan.hardware import Cluster, parse_cluster, usual_price
from argosy.plan.held_axes import held_axes
from argosy.plan.layout_rules import violations
from argosy.plan.layouts import Layout, Work, parallel_keys
from argosy.plan.log import Log, judge
from argosy.plan.own_layout import layout_of, own_candidate, own_run
from argosy.plan.plan_report import (
    LEGEND,
    MEAN_ERROR,
    as_dict,
    copied,
    distinct,
    explain,
    header,
    table,
    verdict,
    why_lost,
)
from argosy.plan.refused_questions import nothing_found, require_precision
from argosy.plan.search import Candidate, Found, evaluate, micro_batches, search, warnings
from argosy.tasks.task_registry import masks_vary, task_of

STACK = "argosy"
DEFAULT_CLUSTER = "1xH100"
# Tokens in a step if no batch is given.
DEFAULT_TOKENS = 2**20
FOR_COPYING = "for the run spec, or the command line of `argosy train` and `launch`:"
# The share of the time above which fp8 is not offered.
WORTH_OFFERING = 0.95
# Tokens of a run per parameter that a token uses, if no length is given.
CHINCHILLA = 20


@dataclass(frozen=True)
class Question:
    """The input of the planner.

    `tokens` is the length of the run, which `length_from` says the origin of, and `fixed` has the axes a user holds (`--what-if`).
    `asked` is the run spec with the batch, samples and precision in question, if its world size is the cluster's; `asks_micro_batch`: a
    run of it leaves its micro-batch to the planner. `offers_narrow`: the user chose no precision, so the plan also reports fp8.
    `price_from` is the origin of the cluster's price, if the user did not give it.
    """

    work: Work
    cluster: Cluster
    tokens: int | None
    fixed: dict[str, object]
    asked: Resolved | None
    offers_narrow: bool = False
    length_from: str = ""
    price_from: str = ""
    asks_micro_batch: bool = False
    # GPUs of the run spec's layout, if it is for more than one and for another number than the cluster has.
    asked_gpus: int | None = None

    @classmethod
    def read(
        cls, target: str | Mapping[str, Any] | RunSpec, overrides: Sequence[Override], *, cluster: str | None, global_batch: int | None,
        seq_len: int | None, tokens: str | None, precision: str | None, what_if: str | None, price: float | None,
        hardware: str | None, spot: float | None = None,
    ) -> Question:  # fmt: skip
        """Read a question.

        `target` is the path of a run.yaml, its keys as a dict, a spec that is already resolved, or the name of a preset. `price` is US
        dollars per hour of one node, and `spot` the price of preemptible nodes as a share of it.
        """
        total, length_from = (None, "") if tokens is None else (_count(tokens), "--tokens")
        spec, origins = None, Origins()
        if not isinstance(target, str) or target.endswith((".yaml", ".yml")) or Path(target).is_file():
            spec, origins = (target, Origins()) if isinstance(target, RunSpec) else _resolved(target, overrides)
            work = work_of(spec, global_batch, seq_len, precision)
            if total is None:
                total, length_from = _tokens_of(spec, _epoch_samples(spec)), "the run spec's length"
            if total is None:
                epochs = spec.train.length.unit == "epochs"
                length_from = (
                    f"{spec.train.length} of data that is not here; --tokens gives its length" if epochs else ""
                )
        else:
            model = resolve_model(target, overrides)
            length = seq_len or model.max_seq_len
            # The targets of an encoder-decoder can have any length.
            others = (("targets", None),) if architecture_of(model).two_sequences else ()
            batch = global_batch or max(1, DEFAULT_TOKENS // length)
            work = Work(model, length, batch, _precision(precision), other_lengths=others)
        if total is None and spec is None:
            total, length_from = (
                CHINCHILLA * count_parameters(work.model).active,
                "Chinchilla's 20 a parameter",
            )
        nodes, price_from = _cluster(cluster, spec, spot, price, hardware)
        require_precision(work, nodes, origins.get("train.precision") if precision is None else "--precision")
        own = None
        if spec is not None and spec.parallel.world_size == nodes.gpus:
            own = own_run(Resolved(spec, origins), global_batch, seq_len, precision)
        return cls(
            work, nodes, total, held_axes(what_if), own,
            offers_narrow=precision is None and work.precision == "bf16", length_from=length_from, price_from=price_from,
            asks_micro_batch=spec is not None and is_micro_batch_open(origins) and planner_chooses(spec),
            asked_gpus=None if spec is None or spec.parallel.world_size in (1, nodes.gpus) else spec.parallel.world_size,
        )  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """The answer of the planner.

    `asked` is the run spec's own layout, or `refusal` says why it cannot run. `storage` is the write bandwidth for checkpoints in GB/s.
    `narrow` is the best layout with fp8 matmuls, if the GPU has them and the user chose no precision. `log` is a training log to compare
    with the plan.
    """

    question: Question
    found: Found
    shown: tuple[Candidate, ...]
    asked: Candidate | None
    refusal: str | None
    storage: float
    narrow: Candidate | None = None
    log: Log | None = None

    def _offer(self, narrow: Candidate) -> str:
        share, size = narrow.time.total / self.shown[0].time.total, narrow.layout.micro_batch
        other = "" if size == self.shown[0].layout.micro_batch else f" with micro_batch={size}"
        return (
            f"fp8 matmuls would take {share:.0%} of the first layout's time and {narrow.fullest.device:.1f} GiB{other}; they change the "
            "numerics, so they are your choice: precision fp8"
        )

    def lines(self, *, explained: bool = False) -> list[str]:
        best, tokens = self.shown[0], self.question.tokens
        lines = [f"{name:<12}{text}" for name, text in self.facts()]
        lines += ["", *table(self.shown, tokens), *LEGEND]
        if len(self.shown) > 1:
            lines += ["", "why the others lost, against the first:", *(f"  {why}" for why in self.lost())]
        if self.asked is not None:
            fits = "" if self.asked.fits else f", which does not fit in {best.cluster.gpu.memory:g} GiB"
            chosen = ", with the micro-batch that a run chooses" if self.question.asks_micro_batch else ""
            lines += ["", f"the run spec's own layout{chosen}{fits}:", *table([self.asked], tokens)]
            lines += [f"  {why_lost(best, self.asked)}"]
            lines += [f"  warning: {warning}" for warning in warnings(self.asked)]
        if self.refusal is not None:
            lines += ["", f"the run spec's own layout cannot run: {self.refusal}"]
        if (gpus := self.question.asked_gpus) is not None:
            lines += ["", f"the run spec's own layout is for {gpus} GPUs, and this cluster has {best.cluster.gpus}"]
        lines += [f"warning: {warning}" for warning in warnings(best)]
        lines += [] if self.narrow is None else [self._offer(self.narrow)]
        if self.log is not None:
            lines += ["", "the log:", *(f"  {line}" for line in judge(self.log, best))]
        if explained:
            lines += ["", *explain(best)]
        return [*lines, "", FOR_COPYING, *copied(best)]

    def facts(self) -> list[tuple[str, str]]:
        """Return the answer in a line, and what was asked, as names and texts."""
        question, best = self.question, self.shown[0]
        asked = header(
            best, self.found, question.tokens, self.storage, length_from=question.length_from, price_from=question.price_from
        )  # fmt: skip
        return [*asked, ("answer", f"{verdict(best, question.tokens)}, with {best.layout}")]

    def lost(self) -> list[str]:
        """Say of the layouts after the first in which terms they lost."""
        return [why_lost(self.shown[0], other) for other in self.shown[1:4]]

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
            "price_from": question.price_from,
            "mean_error": MEAN_ERROR,
            "facts": dict(self.facts()),
            "legend": LEGEND,
            "why_lost": self.lost(),
            "copy": copied(self.shown[0]),
            "offer": None if self.narrow is None else self._offer(self.narrow),
            "considered": self.found.considered,
            "left_out": dict(self.found.left_out),
            "plans": [as_dict(candidate, question.tokens) for candidate in self.shown],
            "asked": None if self.asked is None else as_dict(self.asked, question.tokens),
            "asked_refusal": self.refusal,
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
        raise nothing_found(work, cluster, question.fixed, found)
    own, refusal = None, None
    if question.asked is not None:
        own, refusal = own_candidate(
            question.asked, work, cluster, stack, known, leaves_micro_batch=question.asks_micro_batch
        )
    narrow = _narrow(question, found.best[0]) if question.offers_narrow else None
    return Advice(question, found, tuple(distinct(found, top)), own, refusal, storage, narrow, log)


def _narrow(question: Question, best: Candidate) -> Candidate | None:
    """Return the best layout with fp8 matmuls, if the GPUs and the model's widths allow them and they are worth it.

    Its micro-batch is another one if fp8 matmuls cannot have the tokens of the best one.
    """
    if "fp8" not in best.cluster.gpu.dense or not has_fp8_layers(best.work.model):
        return None
    work, layout, nodes = replace(best.work, precision="fp8"), best.layout, best.cluster
    if not any(violations(work, layout, nodes.gpus)):
        found = [evaluate(work, layout, nodes, best.stack, best.known)]
    else:
        found = [] if "micro_batch" in question.fixed else micro_batches(work, layout, nodes, best.stack, best.known)
    return found[0] if found and found[0].fits and found[0].time.total < WORTH_OFFERING * best.time.total else None


def ranked_layouts(spec: RunSpec, cluster: Cluster, fixed: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield the keys of `parallel` for a run on a cluster, best layout first. `fixed` has the axes that are already chosen."""
    question = Question(work_of(spec), cluster, _tokens_of(spec), fixed, None)
    return (parallel_keys(candidate.layout) for candidate in answer(question, top=1).found.best)


def ranked_micro_batches(spec: RunSpec, cluster: Cluster) -> list[int]:
    """Return micro-batch sizes for a run with its own layout on a cluster, best first; none if its world size is another."""
    known, layout = calibration(), _asked(spec.parallel, cluster)
    if layout is None:
        return []
    found = micro_batches(work_of(spec), layout, cluster, known.stacks[STACK], known)
    return [candidate.layout.micro_batch for candidate in found]


def predict(spec: RunSpec, cluster: Cluster) -> dict[str, Any] | None:
    """Predict memory, time and cost of a run with its own layout, or None if its world size is not the cluster's."""
    known, layout = calibration(), _asked(spec.parallel, cluster)
    if layout is None:
        return None
    candidate = evaluate(work_of(spec), layout, cluster, known.stacks[STACK], known)
    return as_dict(candidate, _tokens_of(spec)) | {"warnings": list(warnings(candidate))}


def _resolved(target: str | Mapping[str, Any], overrides: Sequence[Override]) -> tuple[RunSpec, Origins]:
    found = resolve(Path(target) if isinstance(target, str) else target, overrides, elsewhere=True)
    return found.spec, found.origins


def _priced(cluster: Cluster, spot: float | None, hardware: str | None) -> tuple[Cluster, str]:
    """Return the cluster with a price, if one is known, and the origin of a price that is not the instance's or the user's own.

    GPUs without an instance type cost as much as in the cheapest instance that has them.
    """
    origin = []
    if cluster.price is None and (usual := usual_price(cluster.gpu, hardware)) is not None:
        cluster = replace(cluster, price=usual[0] * cluster.gpus)
        origin.append(f"as in {usual[1]}")
    if cluster.price is not None and spot is not None:
        cluster = replace(cluster, price=cluster.price * spot)
        origin.append(f"spot at {spot:.0%} of on-demand, without the time that interruptions cost")
    return cluster, "; ".join(origin)


def _cluster(
    asked: str | None, spec: RunSpec | None, spot: float | None, price: float | None, hardware: str | None
) -> tuple[Cluster, str]:
    """Return the cluster that is asked for, or the run spec's, or the default, with its price and the price's origin."""
    own = (
        None
        if asked is not None or spec is None or spec.cluster is None or spec.cluster.instance is None
        else spec.cluster
    )
    named = asked or (DEFAULT_CLUSTER if own is None else f"{own.nodes}x{own.instance}")
    cluster = parse_cluster(named, price=price, user_file=hardware)
    return _priced(cluster.using(None if own is None else own.gpus), spot, hardware)


def work_of(
    spec: RunSpec, global_batch: int | None = None, seq_len: int | None = None, precision: str | None = None
) -> Work:
    """Return the step of a run, with a batch, samples and precision that may differ from its own."""
    chosen = precision or ("bf16" if spec.train.precision == "auto" else spec.train.precision)
    return Work(
        spec.model, seq_len or spec.data.seq_len, global_batch or spec.train.global_batch, _precision(chosen),
        rule=spec.optim.rule,
        rule_keys=spec.optim.rule.settings(spec.optim),
        reduced=2.0 if spec.parallel.reduce == "bf16" else None,
        reshard=spec.parallel.reshard or spec.parallel.pp > 1,
        replayed=_may_replay(spec, chosen),
        captured_only=spec.parallel.graph == "on",
        sample_losses=task_of(spec).sample_losses,
        predicted=task_of(spec).predicted_share(spec),
        other_lengths=tuple((name, length) for name, length in sequence_lengths(spec).items() if name != "seq_len"),
        ramp_divisor=0 if spec.train.batch_rampup is None else spec.train.batches.divisor,
    )  # fmt: skip


def _may_replay(spec: RunSpec, precision: str) -> bool:
    # Asked here too, since a step in fp16 is planned as one in bf16.
    loops = spec.model.loops_over_experts(precision, spec.parallel.tp)
    return not (spec.parallel.graph == "off" or spec.parallel.compile != "off" or masks_vary(spec) or loops)


def _tokens_of(spec: RunSpec, epoch_samples: int | None = None) -> int | None:
    """Return the tokens of a run; None if its length is in epochs of an unknown size, or in time."""
    steps = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len, epoch_samples=epoch_samples)
    return None if steps is None else spec.train.batches.samples(steps) * spec.data.seq_len


def _epoch_samples(spec: RunSpec) -> int | None:
    """Return the samples of an epoch, for a length in epochs of corpora on this machine; None if one is elsewhere, or not made yet."""
    if spec.train.length.unit != "epochs" or not all(
        Path(source.path).exists() for source in spec.data.sources.values()
    ):
        return None
    # Loaded here: it imports numpy, which rendering does without.
    from argosy.data.open import open_data

    try:
        return open_data(spec).training().epoch_samples
    except (ArgosyError, OSError):
        return None


def _asked(parallel: ParallelSpec, cluster: Cluster) -> Layout | None:
    return layout_of(parallel) if parallel.world_size == cluster.gpus else None


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

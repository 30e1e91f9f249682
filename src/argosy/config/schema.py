"""The types of the run spec: every key of a run.yaml with its default and a one-line description.

`argosy config schema` publishes them as JSON Schema (`config/json_schema.py`), and docs/run-spec.md is generated from the same
descriptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from argosy.config.batches import Batches
from argosy.config.cluster import ClusterSpec
from argosy.config.lr_schedules import LR_SCHEDULES, SHAPES, LrSchedule
from argosy.config.model import ModelSpec, Section
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers import RULES, OptimizerKeys
from argosy.config.suites import TasksSpec
from argosy.config.survival import FaultSpec, GuardSpec
from argosy.config.units import (
    LENGTH_UNITS,
    Bytes,
    Count,
    Duration,
    DurationField,
    DurationOrAuto,
    DurationOrNone,
    DurationOrNull,
    NotNegative,
    Positive,
    PositiveNumber,
    TimeField,
    Whole,
)
from argosy.config.watching import LogSpec
from argosy.tasks.causal_lm import FimSpec
from argosy.tasks.task_registry import TaskSections

if TYPE_CHECKING:
    ScheduleName = str
    ShapeName = str
else:
    ScheduleName = Literal[tuple(LR_SCHEDULES)]
    ShapeName = Literal[tuple(SHAPES)]


class PrepareSpec(Section):
    """The recipe `argosy data build` and the data stages of `argosy launch` follow to make a corpus that does not exist yet."""

    fetch: str | None = Field(None, description="data set for `argosy data fetch`: slimpajama, owner/name, a URL")
    config: str | None = Field(None, description="fetch: configuration (subset) of the data set, for example en")
    split: str | None = Field(None, description="fetch: train, validation, train_small, …")
    sample: Positive | None = Field(None, description="fetch: only the first files of each split")
    revision: str | None = Field(None, description="fetch: branch, tag or commit")
    raw: str | None = Field(None, description="fetch: directory for the files; default: PATH.raw")
    inputs: list[str] = Field([], description="files, globs or directories, if nothing is fetched")
    as_text: bool = Field(False, description="also read files of other kinds, such as .md and .py, as text")
    key: str | None = Field(None, description="the JSON key or column that holds the text; default: the data set's own")
    shards: Positive = Field(1, description=".bin/.idx pairs to write; workers divide the work by shards")
    shuffle: Whole | None = Field(None, description="shuffle the documents of each shard with this seed")
    curate: list[Any] | str | None = Field(
        None,
        description="curate the texts first: steps as in a pipeline file of `argosy data curate`, or the path of one",
    )
    chat_template: str | None = Field(
        None, description="for conversations: a Jinja file in place of the tokenizer's own chat template"
    )


class DataSource(Section):
    """One prepared corpus and its share of the blend."""

    path: str = Field(
        description="a directory made by `argosy data prepare`, a URL of one, or a Megatron prefix (without .bin/.idx)"
    )
    weight: PositiveNumber | None = Field(
        None, description="relative weight; give it for all sources or for none (none: by token count)"
    )
    cache: str | None = Field(None, description="for a URL: local directory that caches its blocks")
    cache_limit: Bytes | None = Field(None, description="for a URL: maximum size of the cache, for example 200GB")
    prepare: PrepareSpec | None = Field(None, description="how to make the corpus; without it the corpus must exist")


class CorporaSpec(Section):
    """The corpora, their splits, and how windows of their tokens are read."""

    tokenizer: str | None = Field(
        None,
        description="tokenizer.json, hf:NAME of the Hub (fetched once, and kept at its commit), or `bytes`; default: the one stored with the prepared data",
    )
    train: list[DataSource] = Field(min_length=1, description="the corpora, one or more")
    validation: list[DataSource] = Field(
        [], description="corpora to evaluate on while training, whole, in place of a share of the training corpora"
    )
    split: tuple[NotNegative, NotNegative, NotNegative] = Field(
        (98.0, 2.0, 0.0),
        description="relative shares of documents (order megatron: sequences) for training, validation and test; with "
        "`validation`: [1, 0, 0]",
    )
    order: Literal["argosy", "megatron"] = Field(
        "argosy",
        description="order of samples. argosy: needs no index. megatron: bit-exact to its GPTDataset and blends, and splits by "
        "sequence",
    )
    order_cache: str | None = Field(None, description="a directory that caches megatron's shuffle index between starts")
    mask_eod: bool = Field(False, description="take no loss on the first token of a document that follows another")
    fim: FimSpec | None = Field(None, description="fill-in-the-middle, on training samples")
    document_mask: bool = Field(False, description="attention does not cross document boundaries inside a sample")
    reset_positions: bool = Field(False, description="positions restart at each document inside a sample")

    @property
    def sources(self) -> dict[str, DataSource]:
        """All corpora, to train on and to evaluate on, by their keys."""
        lists = {"train": self.train, "validation": self.validation}
        return {f"data.{key}.{number}": one for key, given in lists.items() for number, one in enumerate(given)}


class DataSpec(TaskSections, CorporaSpec):
    """The corpora and how they become samples: windows of the token stream for a decoder; `bert`, `t5` or `ict` describe the
    samples of the other models."""

    seq_len: Positive = Field(description="sequence length: tokens in a sample; default: the model's max_seq_len")


class RampupSpec(Section):
    """Batch size ramp-up: the batch size grows by one increment after each equal share of `samples`."""

    start: Positive = Field(description="batch size of the first step")
    increment: Positive = Field(description="samples by which the batch size grows each time")
    samples: Count = Field(description="samples over which the batch size reaches global_batch")


class TrainSpec(Section):
    """Batch size, length and precision of training. Exactly one of steps, tokens, samples and epochs sets the length."""

    global_batch: Positive = Field(
        description="global batch size: samples in one optimiser step, over all ranks; gradient accumulation steps = "
        "global_batch / (micro_batch x data-parallel ranks)"
    )
    batch_rampup: RampupSpec | None = Field(None, description="batch size ramp-up: smaller batches first")
    steps: Count | None = Field(None, description="optimiser steps")
    tokens: Count | None = Field(None, description="tokens, for example 20B; rounded up to whole steps")
    samples: Count | None = Field(None, description="samples; rounded up to whole steps")
    epochs: PositiveNumber | None = Field(None, description="passes over the training split")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto",
        description="mixed precision: type of matmuls and parameters; master weights stay fp32. auto: bf16 on a GPU, fp32 on a CPU",
    )
    z_loss: NotNegative = Field(
        0.0, description="weight of the z-loss, logsumexp(logits)^2, which keeps logits from drifting; for example 1e-4"
    )
    seed: Whole = Field(1234, description="seed of initialisation, sample order and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    deterministic: bool = Field(
        True, description="use only deterministic algorithms, which give the same bits each time"
    )

    @property
    def batches(self) -> Batches:
        ramp = self.batch_rampup
        return Batches(self.global_batch, None if ramp is None else (ramp.start, ramp.increment, ramp.samples))

    @property
    def length(self) -> Duration:
        for unit in LENGTH_UNITS:
            amount = getattr(self, unit)
            if amount is not None:
                return Duration(float(amount), unit)
        raise AssertionError("checked when the spec was resolved: one of the four is given")


class OptimSpec(OptimizerKeys):
    """The optimiser, whose own keys are declared in `config/optimizers/`, and its learning-rate schedule."""

    lr: PositiveNumber = Field(description="peak learning rate")
    min_lr: NotNegative = Field(description="final learning rate; default: lr / 10")
    warmup: DurationOrNone = Field(
        Duration(0.0, "steps"), description="linear warmup to the peak, for example 200ba or 300M tokens"
    )
    warmup_init: NotNegative | None = Field(
        None,
        description="learning rate of the first step; the peak is then reached at the step after the warmup, as in Megatron. "
        "Default: the first step has lr / warmup steps, and the last warmup step has the peak",
    )
    schedule: ScheduleName = Field(
        "cosine",
        description="decay from the peak to min_lr; wsd (warmup-stable-decay): stay at the peak, then decay over the last `decay`",
    )
    decay: DurationOrNull = Field(None, description="wsd: length of the decay, for example 2000ba or 10B tokens")
    decay_end: DurationOrNull = Field(
        None,
        description="point of training at which the learning rate reaches min_lr and stays there, before or after the end of the "
        "run. Default: the last step of the run",
    )
    decay_shape: ShapeName | None = Field(
        None, description="wsd: shape of the decay; default: linear. sqrt: 1 - sqrt(x); exponential: 2 x 0.5^x - 1"
    )
    weight_decay: NotNegative = Field(0.1, description="weight decay of matrices and embeddings")
    no_decay: list[str] = Field(
        [],
        description="name patterns of further parameters without weight decay; a pattern that matches nothing is an error",
    )
    lr_scale: dict[str, PositiveNumber] = Field(
        {}, description="learning-rate factors by name pattern, for example {embed.*: 0.1}; the first match is used"
    )
    clip: PositiveNumber | None = Field(1.0, description="gradient clipping: largest gradient norm; null: no clipping")

    @property
    def rule(self) -> Rule:
        """The optimiser that `name` chooses."""
        return RULES[self.name]

    @property
    def lr_schedule(self) -> LrSchedule:
        """The learning-rate schedule that `schedule` chooses."""
        return LR_SCHEDULES[self.schedule]


class EvalSpec(Section):
    """Evaluation on the validation split while training. `eval: off` turns it off."""

    every: DurationField = Field(Duration(100.0, "steps"), description="how often")
    batches: Whole = Field(10, description="global batches in one evaluation")
    patience: Positive | None = Field(
        None,
        description="early stopping: end the run after this many evaluations in a row without a lower validation loss",
    )
    min_delta: NotNegative = Field(
        0.0, description="with patience: the least decrease of the loss that counts as lower"
    )
    tasks: TasksSpec | None = Field(None, description="tasks to score every so often")


class CheckpointSpec(Section):
    """Checkpointing. A last checkpoint is always saved at the end and on SIGTERM or Ctrl-C."""

    every: DurationOrAuto = Field(
        Duration(500.0, "steps"),
        description="how often; auto: the interval that loses least time, sqrt(2 x stall x mtbf)",
    )
    mtbf: TimeField = Field(
        Duration(86400.0, "seconds"), description="with `every: auto`: mean time between failures (MTBF)"
    )
    mode: Literal["async", "sync"] = Field(
        "async",
        description="async: training waits only for a copy in memory, and the files are written in the background",
    )
    keep: Positive = Field(3, description="number of newest checkpoints to keep")
    keep_every: Positive | None = Field(None, description="also keep checkpoints whose step is a multiple of this")
    best: Literal["validation_loss"] | None = Field(
        None,
        description="also save after an evaluation with the lowest loss so far, and keep that checkpoint: RUN/best",
    )
    max_failures: Positive = Field(5, description="consecutive failed saves before the run stops")


class ParallelSpec(Section):
    """The parallel layout. `parallel: auto` (or leaving a key out) lets Argosy choose."""

    dp_replicate: Positive = Field(1, description="data parallelism: replicas of the model (DDP; with dp_shard, HSDP)")
    dp_shard: Positive = Field(
        1, description="ranks that shard parameters, gradients and optimiser state of each replica (FSDP)"
    )
    tp: Positive = Field(1, description="tensor-parallel ranks")
    sp: bool = Field(
        True, description="sequence parallelism, with tp: shard norms, dropout and the residual stream by tokens"
    )
    pp: Positive = Field(1, description="pipeline-parallel ranks: each holds consecutive layers")
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"] = Field(
        "1f1b", description="with pp: pipeline schedule, the order in which ranks process the micro-batches of a step"
    )
    vpp: Positive = Field(
        1,
        description="with pp: virtual pipeline stages on each rank; default: 2 for schedules that need several, else 1",
    )
    cp: Positive = Field(1, description="context-parallel ranks")
    cp_kind: Literal["allgather", "ulysses"] = Field(
        "allgather",
        description="with cp: all-gather keys and values, or exchange tokens for heads around attention (all-to-all)",
    )
    ep: Positive = Field(1, description="expert-parallel ranks")
    reshard: bool = Field(
        True,
        description="with dp_shard: free a block's all-gathered parameters after its forward pass (FSDP's reshard_after_forward); "
        "default with pp: false, because every micro-batch would all-gather them again",
    )
    reduce: Literal["fp32", "bf16"] = Field(
        "fp32", description="type of gradients while they are reduced over data-parallel ranks"
    )
    micro_batch: Positive = Field(
        description="micro-batch size: samples in one forward pass on one rank; gradient accumulation does the rest of global_batch; "
        "by default the fastest that fits, by the planner, on a GPU it knows, and elsewhere at most 16,384 tokens; a resumed run keeps its own"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="activation checkpointing: what the backward pass recomputes; nothing, the cheap operations, or whole blocks",
    )
    compile: Literal["off", "block", "model"] = Field(
        "off",
        description="torch.compile, block by block or the whole model; off: Argosy's own kernels on a GPU, plain torch on a CPU",
    )
    graph: Literal["auto", "on", "off"] = Field(
        "auto",
        description="CUDA graph: capture the kernels of a pass once and launch them together; needs a GPU, compile off, no dropout with "
        "recompute, no pp or ep, no dp_shard together with dp_replicate, and document masks only where Argosy's own kernels read them. auto: if "
        "the step is launch-bound, without dp_shard, tp and cp, and of several GPUs if steps become shorter. on: always, with the "
        "collectives of dp_shard, tp and cp too. off: launch kernels one by one",
    )

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard


class RunSpec(Section):
    """A whole run, from data to checkpoint."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(
        "run", description="names the run directory: letters, digits, '.', '_' and '-', 63 at most"
    )
    runs_dir: str = Field("runs", description="where run directories are made")
    model: ModelSpec = Field(description="a preset's name, or its keys, or a preset and keys that change it")
    init_from: str | None = Field(
        None,
        description="weights to start from: hf:DIR, a run, a checkpoint of one, or an imported model; `model:` can be omitted",
    )
    data: DataSpec = Field(description="the corpus")
    train: TrainSpec = Field(description="batch size, length and precision")
    optim: OptimSpec = Field(description="optimiser and learning-rate schedule")
    parallel: ParallelSpec = Field(description="the parallel layout, or `auto`")
    eval: EvalSpec | None = Field(EvalSpec(), description="evaluation while training, or `off`")
    checkpoint: CheckpointSpec = Field(CheckpointSpec(), description="checkpointing")
    log: LogSpec = Field(LogSpec(), description="logging")
    fault: FaultSpec = Field(FaultSpec(), description="reaction to ranks that die or hang")
    guard: GuardSpec | None = Field(
        GuardSpec(), description="reaction to loss spikes and NaN: skip the step, then rewind; or `off`"
    )
    cluster: ClusterSpec | None = Field(None, description="where `argosy launch` starts the run")


# Keys that a resolved spec must have, but that users can omit: they are derived from other keys.
DERIVED_KEYS = {"ParallelSpec": ["micro_batch"], "DataSpec": ["seq_len"], "OptimSpec": ["min_lr"]}

"""The run spec as types: what may be written in a run.yaml, with its defaults and one-line descriptions.

`argosy config schema` publishes it as JSON Schema (`config/json_schema.py`), and docs/run-spec.md is made from the same
descriptions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from argosy.config.batches import Batches
from argosy.config.cluster import ClusterSpec
from argosy.config.model import ModelSpec, Section
from argosy.config.survival import FaultSpec, GuardSpec
from argosy.config.units import (
    Bytes,
    Count,
    Duration,
    DurationField,
    DurationOrAuto,
    DurationOrNone,
    DurationOrNull,
    Fraction,
    NotBool,
    NotNegative,
    Positive,
    PositiveNumber,
    TimeField,
    Whole,
)
from argosy.config.watching import LogSpec
from argosy.tasks.causal_lm import FimSpec
from argosy.tasks.registry import TaskSections


class PrepareSpec(Section):
    """How a corpus is made where it is not there yet, by `argosy data build` and the data stages of `argosy launch`."""

    fetch: str | None = Field(None, description="what `argosy data fetch` is asked for: slimpajama, owner/name, a URL")
    config: str | None = Field(None, description="fetch: part of the data set, as en")
    split: str | None = Field(None, description="fetch: train, validation, train_small, …")
    sample: Positive | None = Field(None, description="fetch: only the first files of each split")
    revision: str | None = Field(None, description="fetch: branch, tag or commit")
    raw: str | None = Field(None, description="fetch: directory for the files; default: PATH.raw")
    inputs: list[str] = Field([], description="files, globs or directories, where nothing is fetched")
    key: str | None = Field(None, description="the JSON key or column that holds the text; default: the data set's own")
    shards: Positive = Field(1, description="pairs of .bin/.idx to make; workers share the work by shards")
    shuffle: Whole | None = Field(None, description="put the documents of each shard in the random order of this seed")


class DataSource(Section):
    """One prepared corpus and its share of the blend."""

    path: str = Field(
        description="a directory made by `argosy data prepare`, a Megatron prefix (without .bin/.idx), or a URL of the former"
    )
    weight: PositiveNumber | None = Field(
        None, description="relative weight; give it for all sources or for none (none: by token count)"
    )
    cache: str | None = Field(None, description="for a URL: the local directory its blocks are kept in")
    cache_limit: Bytes | None = Field(None, description="for a URL: the most that directory may take, as 200GB")
    prepare: PrepareSpec | None = Field(None, description="how it is made; without it the corpus must be there")


class CorporaSpec(Section):
    """The corpora, their splits, and how windows of their tokens are read."""

    tokenizer: str | None = Field(
        None, description="tokenizer.json, or `bytes`; default: the one stored with the prepared data"
    )
    train: list[DataSource] = Field(min_length=1, description="the corpora, one or more")
    split: tuple[NotNegative, NotNegative, NotNegative] = Field(
        (98.0, 2.0, 0.0),
        description="relative shares of documents (order megatron: sequences) for training, validation and test",
    )
    order: Literal["argosy", "megatron"] = Field(
        "argosy",
        description="of samples: ours needs no index; megatron's is bit-exact to its GPTDataset and blends, and splits by sequence",
    )
    order_cache: str | None = Field(None, description="a directory that keeps megatron's shuffled order between starts")
    mask_eod: bool = Field(False, description="take no loss on the first token of a document that follows another")
    fim: FimSpec | None = Field(None, description="fill-in-the-middle, on training samples")
    document_mask: bool = Field(False, description="attention does not cross the end of a document inside a sample")
    reset_positions: bool = Field(False, description="positions restart at each document inside a sample")


class DataSpec(TaskSections, CorporaSpec):
    """The corpus and how it is cut into samples: windows of the token stream for a decoder, and what `bert`, `t5` or
    `ict` describe for the other models."""

    seq_len: Positive = Field(description="tokens in a sample; the model's max_seq_len unless given")


class RampupSpec(Section):
    """A batch that grows: steps start small, and get larger by one increment after each equal share of the samples."""

    start: Positive = Field(description="samples in the first step")
    increment: Positive = Field(description="samples by which steps grow")
    samples: Count = Field(description="consumed when the batch has its full size")


class TrainSpec(Section):
    """How long and how large. Exactly one of steps, tokens, samples and epochs says how long."""

    global_batch: Positive = Field(description="samples in one optimiser step, over all devices")
    batch_rampup: RampupSpec | None = Field(None, description="smaller steps at first, growing to global_batch")
    steps: Count | None = Field(None, description="optimiser steps")
    tokens: Count | None = Field(None, description="tokens, as 20B; rounded up to whole steps")
    samples: Count | None = Field(None, description="samples; rounded up to whole steps")
    epochs: PositiveNumber | None = Field(None, description="passes over the training split")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto", description="of products and parameters; masters stay 32-bit. auto: bf16 on a GPU, fp32 on a CPU"
    )
    z_loss: NotNegative = Field(
        0.0, description="weight of the square of log(sum of exp(logits)), which keeps logits from drifting, as 1e-4"
    )
    seed: Whole = Field(1234, description="of initialisation, sample order and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    deterministic: bool = Field(True, description="only algorithms that give the same bits each time")

    @property
    def batches(self) -> Batches:
        ramp = self.batch_rampup
        return Batches(self.global_batch, None if ramp is None else (ramp.start, ramp.increment, ramp.samples))

    @property
    def length(self) -> Duration:
        for unit in ("steps", "tokens", "samples", "epochs"):
            amount = getattr(self, unit)
            if amount is not None:
                return Duration(float(amount), unit)
        raise AssertionError("checked when the spec was resolved: one of the four is given")


class MuonSpec(Section):
    """Muon, for the matrices inside the layers; everything else is AdamW's, with the keys beside this section."""

    momentum: Fraction = Field(0.95, description="share of the momentum that is kept at each step")
    nesterov: bool = Field(True, description="look ahead by one step")
    ns_steps: Annotated[int, Field(ge=1, le=99), NotBool] = Field(5, description="Newton-Schulz iterations")
    lr_scaling: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="the learning rate times 0.2 sqrt(max(out, in)), so that AdamW's serves; or times sqrt(max(1, out / in))",
    )


class OptimSpec(Section):
    """The optimiser and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = Field("adamw", description="optimiser")
    muon: MuonSpec | None = Field(None, description="with `name: muon`")
    lr: PositiveNumber = Field(description="peak learning rate")
    min_lr: NotNegative = Field(description="final learning rate; lr / 10 unless given")
    warmup: DurationOrNone = Field(
        Duration(0.0, "steps"), description="linear rise to the peak, as 200ba or 300M tokens"
    )
    warmup_init: NotNegative | None = Field(
        None,
        description="learning rate of the first step; the step after the warm-up then has the peak, as Megatron's. Unless "
        "given, the first step has lr / warmup steps, and the last one of the warm-up the peak",
    )
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = Field(
        "cosine", description="from the peak to min_lr; wsd: stay at the peak, then fall over the last `decay`"
    )
    decay: DurationOrNull = Field(None, description="wsd: how long the fall is, as 2000ba or 10B tokens")
    decay_end: DurationOrNull = Field(
        None,
        description="how far into training the learning rate reaches min_lr, before the run's end or after it; it stays there. "
        "Unless given, the run's last step has min_lr",
    )
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] | None = Field(
        None, description="wsd: how it falls; linear unless given. sqrt: 1 - sqrt(x); exponential: 2 x 0.5^x - 1"
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="Adam's decay rates")
    eps: PositiveNumber = Field(1e-8, description="Adam's epsilon")
    weight_decay: NotNegative = Field(0.1, description="on matrices and embeddings")
    no_decay: list[str] = Field(
        [], description="further parameters without decay, as name patterns; one that matches nothing is an error"
    )
    lr_scale: dict[str, PositiveNumber] = Field(
        {}, description="learning-rate factors by name pattern, as {embed.*: 0.1}; the first that matches counts"
    )
    clip: PositiveNumber | None = Field(1.0, description="largest gradient norm; null: no clipping")


class EvalSpec(Section):
    """Evaluation on the validation split while training. `eval: off` turns it off."""

    every: DurationField = Field(Duration(100.0, "steps"), description="how often")
    batches: Whole = Field(10, description="global batches each time")


class CheckpointSpec(Section):
    """Saving. A last checkpoint is always written at the end and on SIGTERM or Ctrl-C."""

    every: DurationOrAuto = Field(
        Duration(500.0, "steps"), description="how often; auto: as often as loses least time, sqrt(2 x stall x mtbf)"
    )
    mtbf: TimeField = Field(Duration(86400.0, "seconds"), description="with `every: auto`: time between failures")
    mode: Literal["async", "sync"] = Field(
        "async", description="async: training waits for a copy in memory only, and files are written beside it"
    )
    keep: Positive = Field(3, description="newest checkpoints to keep")
    keep_every: Positive | None = Field(None, description="keep those too whose step is a multiple of this")
    max_failures: Positive = Field(5, description="saves that may fail in a row before the run is stopped")


class ParallelSpec(Section):
    """The layout. `parallel: auto` (or leaving a key out) lets Argosy choose."""

    dp_replicate: Positive = Field(1, description="replicas of the model")
    dp_shard: Positive = Field(1, description="ranks each replica's state is sharded over (FSDP)")
    tp: Positive = Field(1, description="tensor parallel ranks")
    sp: bool = Field(
        True, description="with tp: spread by tokens what tp does not cut: norms, dropout and the residual stream"
    )
    pp: Positive = Field(
        1, description="pipeline ranks: each has consecutive layers, and passes on what it made of them"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"] = Field(
        "1f1b", description="with pp: in which order ranks work on the micro-batches of a step"
    )
    vpp: Positive = Field(
        1, description="with pp: stages each rank holds; 2 unless given for schedules that need several"
    )
    cp: Positive = Field(1, description="context parallel ranks")
    cp_kind: Literal["allgather", "ulysses"] = Field(
        "allgather", description="with cp: gather all keys and values, or swap tokens for heads around attention"
    )
    ep: Positive = Field(1, description="expert parallel ranks")
    reshard: bool = Field(
        True,
        description="with dp_shard: let go of a block's gathered parameters after its forward pass, or keep them; "
        "false unless given with pp, where every micro-batch would gather them again",
    )
    reduce: Literal["fp32", "bf16"] = Field(
        "fp32", description="of gradients while they are summed over data-parallel ranks"
    )
    micro_batch: Positive = Field(description="samples in one forward pass on one rank")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="what the backward pass makes again instead of keeping it: nothing, the cheap operations, whole blocks",
    )
    compile: Literal["off", "block", "model"] = Field(
        "off",
        description="torch.compile, block by block or the whole model; off: Argosy's own kernels on a GPU, plain torch on a CPU",
    )
    graph: Literal["auto", "off"] = Field(
        "auto",
        description="record the kernels of a pass once and start them as a whole: one GPU, no dropout, no document mask, compile "
        "off, and only where the host is slower than the GPU; off: start them one by one",
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
        description="weights to start from: hf:DIR, a run, a checkpoint of one, or an imported model; `model:` may be left out",
    )
    data: DataSpec = Field(description="the corpus")
    train: TrainSpec = Field(description="batch and length")
    optim: OptimSpec = Field(description="optimiser")
    parallel: ParallelSpec = Field(description="the layout, or `auto`")
    eval: EvalSpec | None = Field(EvalSpec(), description="evaluation while training, or `off`")
    checkpoint: CheckpointSpec = Field(CheckpointSpec(), description="saving")
    log: LogSpec = Field(LogSpec(), description="logging")
    fault: FaultSpec = Field(FaultSpec(), description="what is done about ranks that die or stand still")
    guard: GuardSpec | None = Field(
        GuardSpec(), description="what is done about steps with bad numbers: skipped, then rewound, or `off`"
    )
    cluster: ClusterSpec | None = Field(None, description="where `argosy launch` starts it")


# Required once resolved, but filled in from other keys when the user leaves them out.
DERIVED_KEYS = {"ParallelSpec": ["micro_batch"], "DataSpec": ["seq_len"], "OptimSpec": ["min_lr"]}

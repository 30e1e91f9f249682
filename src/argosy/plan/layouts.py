"""What is planned: the work of a step, the layout it is spread by, and the software that runs it.

A layout's rules of divisibility live here, so that search, verbs and benchmarks ask the same questions of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from argosy.config.counts import (
    TARGETS_PER_SOURCE,
    attention_parameters,
    layer_flops,
    mlp_parameters,
    norm_parameters,
)
from argosy.config.model import ModelSpec
from argosy.config.stage_layers import V_SHAPED
from argosy.families.architecture import architecture_of
from argosy.families.layers import NORMS_OF_A_BLOCK
from argosy.families.registry import plan_of

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Layout:
    """How ranks share a step. `dp` counts all data-parallel ranks; `zero` says what they shard: 0 nothing, 1 the
    optimiser, 2 gradients too, 3 weights too (FSDP). `ep` takes its ranks from data and context parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1  # chunks of layers a stage holds: above 1 the schedule is interleaved
    cp: int = 1
    ep: int = 1
    etp: int = 0  # ranks that share one expert's matrices; 0: those of `tp`
    dp: int = 1
    zero: int = 0
    copies: int = 1  # of what is sharded: above 1 data-parallel ranks shard it in that many groups
    sp: bool = False  # what tensor parallelism does not split is split along the sequence
    micro_batch: int = 1
    recompute: Recompute = "none"
    schedule: Schedule | None = None  # of a pipeline; None: 1f1b, or interleaved where there are chunks

    @property
    def is_v_shaped(self) -> bool:
        """Down the ranks with one half of the layers and up with the other, so that the first rank has both ends of the
        model; the backward pass is made in two halves, and the second of them fills gaps."""
        return self.schedule in V_SHAPED

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage has the embedding, and whether it has the output head."""
        return stage == 0, stage == (0 if self.schedule in V_SHAPED else self.pp - 1)

    @property
    def shards(self) -> int:
        """Ranks that hold the same part of the model, and may each hold a piece of it."""
        return self.dp * self.cp // self.copies

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    def expert_shards(self, shards: int) -> int:
        """Ranks that hold the same experts, where `shards` hold the same of the rest."""
        return max(1, shards * self.tp // (self.expert_tp * self.ep))

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        axes = [
            f"{axis}{getattr(self, axis)}" for axis in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(self, axis) > 1
        ]
        sharded = f"zero{self.zero}" + (f"/{self.dp // self.copies}" if self.copies > 1 else "")
        axes += [f"etp{self.etp}"] if self.etp and self.etp != self.tp else []
        parts = [*axes, f"mb{self.micro_batch}", *([sharded] if self.zero else [])]
        parts += ["sp"] if self.sp else []
        parts += [self.schedule] if self.schedule in ("gpipe", *V_SHAPED) else []
        return " ".join([*parts, *([] if self.recompute == "none" else [f"recompute={self.recompute}"])])


@dataclass(frozen=True)
class Latent:
    """Latent attention, as DeepSeek's models have it: queries, keys and values are made of narrow vectors, and a head's
    queries and keys have a rotary part beside `head_dim`."""

    query: int = 1536  # width of the vector queries are made of; 0: of the stream itself
    key_value: int = 512
    rotary: int = 64

    @property
    def width(self) -> int:
        return self.query + self.key_value + self.rotary

    def matrices(self, model: ModelSpec) -> list[tuple[int, int]]:
        """(inputs, outputs) of those that widen the narrow vectors to heads."""
        return [
            (self.query or model.hidden, model.heads * (model.head_dim + self.rotary)),
            (self.key_value, 2 * model.heads * model.head_dim),
        ]

    def parameters(self, model: ModelSpec) -> tuple[int, int]:
        """(that tensor parallelism splits, that every rank has)"""
        split = sum(inputs * outputs for inputs, outputs in self.matrices(model))
        return split + model.heads * model.head_dim * model.hidden, model.hidden * self.width


@dataclass(frozen=True)
class Work:
    """One optimiser step of a model. `latent` and `next_tokens` (layers that each predict one token further, with the output
    head once more) are parts that other programs' models have."""

    model: ModelSpec
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    latent: Latent | None = None
    next_tokens: int = 0
    optimizer: str = "adamw"
    muon_steps: int = 5  # Newton-Schulz iterations
    reduced: float | None = None  # bytes of a gradient while ranks sum it up; None: the stack's own
    reshard: bool = True  # with ZeRO-3: gathered weights of a layer are let go of after its forward pass
    replayed: bool = True  # the host may start the kernels of a pass as a whole, where the stack can

    @property
    def tokens(self) -> int:
        """Of both sides, where a model reads one sequence and writes another."""
        return round(self.seq_len * self.global_batch * (1 + self.sizes.decoder.targets))

    def micro_batches(self, layout: Layout) -> int:
        """In a step, of one pipeline."""
        return max(1, round(self.global_batch / (layout.dp * layout.micro_batch)))

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.model, self.latent, self.next_tokens)

    @cached_property
    def head_layers(self) -> float:
        """The output head's work, in layers."""
        layers, head = layer_flops(self.model, self.seq_len)
        return head / layers[-1]

    def __hash__(self) -> int:
        return hash((id(self.model), self.seq_len, self.global_batch, self.precision, self.latent, self.next_tokens))


@dataclass(frozen=True)
class Decoder:
    """The second stack of an encoder-decoder: its share of the layers, and tokens it has for each the encoder reads."""

    share: float = 0.0
    targets: float = 0.0

    def mean(self, encoder: float, decoder: float) -> float:
        """Of what a layer of each stack has."""
        return (1 - self.share) * encoder + self.share * decoder


@dataclass(frozen=True)
class Sizes:
    """Parameters of an average layer and of the ends, and the widths that activations have, for each token that is read: a
    decoder's layers, which have fewer tokens and look at two sequences, make the average width another."""

    layers: int
    hidden: int
    stream: float  # width of the residual stream
    query: float  # width of all query heads
    key_value: float  # width of all key heads, and of all value heads
    latent: int  # width of the narrow vectors latent attention has
    attention: float  # matmul parameters of attention that tensor parallelism splits
    mlp: float  # matmul parameters of what every token passes through: dense MLPs and shared experts, a layer
    expert: int  # matmul parameters of one routed expert
    expert_layers: float  # share of the layers that have experts
    other: float  # norms and biases of a layer
    embedding: int
    head: int
    mlp_width: float  # inner width every token passes through, a layer, one input
    expert_width: float  # and that of the experts it is routed to, all of them together
    predicted: float  # tokens the head judges, for each that is read
    decoder: Decoder


def sizes_of(model: ModelSpec, latent: Latent | None = None, next_tokens: int = 0) -> Sizes:
    attention, attention_other = attention_parameters(model)
    dense, dense_other = mlp_parameters(model, model.ffn)
    moe, share = model.moe, 0.0
    expert = shared = 0
    if moe is not None:
        share = 1 - moe.dense_layers / model.layers
        expert = mlp_parameters(model, moe.ffn)[0]
        shared = moe.shared_experts * expert + model.hidden * moe.experts
    embedding = model.vocab_size * model.hidden
    kind, decoder = architecture_of(model), Decoder()
    layers = sum(kind.stacks(model)) + next_tokens
    if kind.two_sequences:
        decoder = Decoder(1 - model.layers / layers, TARGETS_PER_SOURCE)
    targets = decoder.targets
    more_norms = NORMS_OF_A_BLOCK[plan_of(model)[0].norms] - 2  # behind attention and MLP, which keep their inputs too
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if latent is not None:  # queries and keys are wider than values; their mean gives the same FLOPs and bytes
        query = key_value = model.heads * (model.head_dim + latent.rotary // 2)
        attention, attention_other = latent.parameters(model)
    return Sizes(
        layers=layers,
        hidden=model.hidden,
        stream=model.hidden * decoder.mean(1, 1.5 * targets) * (1 + more_norms / 4),  # three blocks instead of two
        query=query * decoder.mean(1, 2 * targets),  # of itself, and across
        key_value=key_value * decoder.mean(1, targets + 1),
        latent=0 if latent is None else latent.width,
        attention=attention * decoder.mean(1, 2),
        mlp=(1 - share) * dense + share * shared,
        expert=expert,
        expert_layers=share,
        other=attention_other * decoder.mean(1, 2)
        + (1 - share) * dense_other
        + (decoder.mean(2, 3) + more_norms) * norm_parameters(model),
        embedding=embedding + (model.max_seq_len * model.hidden if model.positions == "learned" else 0),
        head=embedding,
        mlp_width=(1 - share) * model.ffn * decoder.mean(1, targets)
        + share * (0 if moe is None else moe.shared_experts * moe.ffn),
        expert_width=0.0 if moe is None else share * moe.top_k * moe.ffn,
        predicted=(targets or 1.0) * (1 + next_tokens),
        decoder=decoder,
    )


def stage_layers(work: Work, layout: Layout, *, levelled: bool = False) -> tuple[int, ...]:
    """Layers of each rank's stages: equal, and the first ones one more where they do not divide. `levelled`: fewer in the last,
    for the output head, as far as that makes the slowest stage faster."""
    chunks = layout.vpp if layout.pp * layout.vpp <= work.sizes.layers else 1
    return _of_ranks(
        work.sizes.layers, layout.pp, chunks, work.head_layers if levelled else 0.0, layout.schedule in V_SHAPED
    )


@lru_cache
def _of_ranks(layers: int, ranks: int, chunks: int, head: float, v_shaped: bool) -> tuple[int, ...]:
    stages = _split(layers, ranks * chunks, head)
    if v_shaped:
        return tuple(down + up for down, up in zip(stages[:ranks], reversed(stages[ranks:]), strict=True))
    return tuple(sum(stages[rank::ranks]) for rank in range(ranks))


def _split(layers: int, stages: int, head: float) -> tuple[int, ...]:
    if stages == 1:
        return (layers,)

    def slowest(last: int) -> float:
        return max(-(-(layers - last) // (stages - 1)), last + head)

    last = min(range(layers // stages, 0, -1), key=slowest)
    each, over = divmod(layers - last, stages - 1)
    return (*(each + (stage < over) for stage in range(stages - 1)), last)


def violations(work: Work, layout: Layout, gpus: int) -> Iterator[str]:
    """Why this layout cannot run, with the numbers; nothing where it can."""
    model = work.model
    if layout.gpus != gpus:
        yield f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} = {layout.gpus}, not {gpus} GPUs"
    for what, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if size % layout.tp and not (what == "kv_heads" and layout.tp % size == 0):
            yield f"{what} {size} is not divisible by tp {layout.tp}"
    if layout.pp * layout.vpp > work.sizes.layers:
        yield f"pp {layout.pp} x vpp {layout.vpp} is more than {work.sizes.layers} layers"
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp {layout.vpp} is a pipeline's, and pp is 1"
    if layout.schedule is not None and layout.pp == 1:
        yield f"{layout.schedule} is a pipeline's, and pp is 1"
    if layout.pp > 1 and model.retrieval is not None:
        yield f"pp {layout.pp} cuts a sequence of layers, and two towers are none"
    if layout.pp > 1 and layout.is_v_shaped and layout.vpp != 2:
        yield f"{layout.schedule} has two stages on each rank, not {layout.vpp}"
    if layout.schedule == "dualpipev" and work.micro_batches(layout) < 2 * layout.pp:
        yield f"{work.micro_batches(layout)} micro-batches are fewer than 2 x pp {layout.pp}, as dualpipev needs"
    if layout.cp > 1 and architecture_of(model).uncuttable is not None:
        yield f"cp {layout.cp} cuts the sequences of decoders only"
    if work.seq_len % (layout.cp * (2 if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)):
        yield f"seq_len {work.seq_len} is not divisible by cp {layout.cp}" + (f" x tp {layout.tp}" if layout.sp else "")
    if work.global_batch % (layout.dp * layout.micro_batch):
        yield f"global_batch {work.global_batch} is not divisible by dp {layout.dp} x micro_batch {layout.micro_batch}"
    elif layout.vpp > 1 and work.micro_batches(layout) % layout.pp:
        yield f"{work.micro_batches(layout)} micro-batches are not a multiple of pp {layout.pp}, as interleaving needs"
    if layout.ep > 1 and (model.moe is None or model.moe.experts % layout.ep):
        yield f"ep {layout.ep} does not divide {0 if model.moe is None else model.moe.experts} experts"
    if layout.dp % layout.copies:
        yield f"dp {layout.dp} does not make {layout.copies} copies"
    elif layout.shards % layout.ep:
        yield f"ep {layout.ep} does not divide the {layout.shards} ranks of a copy"

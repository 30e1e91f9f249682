"""The objects the planner works on: the work of a step, and the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Literal

from argosy.config.counts import (
    TARGETS_PER_SOURCE,
    attention_parameters,
    mlp_parameters,
    norm_parameters,
    training_flops_per_token,
)
from argosy.config.fp8_rules import fp8_micro_batch, fp8_refusal
from argosy.config.model import ModelSpec, Section
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers import DEFAULT
from argosy.config.stage_layers import V_SHAPED, rank_of_stage, split_layers
from argosy.families.adapter_sizes import adapted_layers, adapter_parameters
from argosy.families.architecture import NORMS_OF_A_BLOCK, architecture_of
from argosy.families.family_registry import plan_of

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Layout:
    """A parallel layout.

    `dp` counts all data-parallel ranks. `zero` is the ZeRO stage: 0 shards nothing, 1 optimiser state, 2 gradients too, 3 weights
    too (FSDP). With `copies` above 1 the data-parallel ranks shard in that many groups (HSDP). `ep` takes its ranks from data and
    context parallelism, and `etp` is the tensor parallelism of experts (0: the same as `tp`). `vpp` is the number of virtual
    stages on a pipeline rank; above 1 the schedule is interleaved. `sp` is sequence parallelism. `schedule` None is 1f1b, or
    interleaved 1f1b if `vpp` is above 1.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    dp: int = 1
    zero: int = 0
    copies: int = 1
    sp: bool = False
    micro_batch: int = 1
    recompute: Recompute = "none"
    schedule: Schedule | None = None

    @property
    def is_v_shaped(self) -> bool:
        """True for zbv and dualpipev.

        A V-shaped schedule goes down the ranks with the first half of the layers and up with the second, so the first rank has
        both ends of the model. Weight gradients are computed separately from input gradients, and fill the pipeline bubble.
        """
        return self.schedule in V_SHAPED

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Return whether a stage has the embedding, and whether it has the output head."""
        return stage == 0, stage == (0 if self.schedule in V_SHAPED else self.pp - 1)

    @property
    def shards(self) -> int:
        """Number of ranks that hold the same part of the model, over which ZeRO can shard it."""
        return self.dp * self.cp // self.copies

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    def expert_shards(self, shards: int) -> int:
        """Number of ranks that hold the same experts, if `shards` ranks hold the same other parameters."""
        return max(1, shards * self.tp // (self.expert_tp * self.ep))

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        """Return the layout as keys of the run spec's `parallel` section, and what the spec has no key for."""
        keys = parallel_keys(self)
        keys |= {"sp": "false"} if self.tp > 1 and not self.sp else {}
        keys |= {"etp": self.etp} if self.etp and self.etp != self.tp else {}
        keys |= {"zero": self.zero} if self.zero in (1, 2) else {}
        return " ".join(f"{key}={value}" for key, value in keys.items())


def parallel_keys(layout: Layout) -> dict[str, object]:
    """Return a layout as keys of the run spec's `parallel` section."""
    keys = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "ep": layout.ep}
    shard = layout.dp // layout.copies if layout.zero else 1
    spread = {"dp_replicate": layout.dp // shard, "dp_shard": shard}
    sizes: dict[str, object] = {k: v for k, v in {**keys, **spread}.items() if v > 1}
    if layout.schedule is not None or layout.vpp > 1:
        sizes["schedule"] = layout.schedule or "interleaved-1f1b"
    sizes["micro_batch"] = layout.micro_batch
    return sizes if layout.recompute == "none" else {**sizes, "recompute": layout.recompute}


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA) of DeepSeek's models.

    Queries, keys and values are projected from low-rank latent vectors, and queries and keys have a rotary part of width `rotary`
    in addition to `head_dim`. `query` 0: queries are projected from the residual stream.
    """

    query: int = 1536
    key_value: int = 512
    rotary: int = 64

    @property
    def width(self) -> int:
        return self.query + self.key_value + self.rotary

    def matrices(self, model: ModelSpec) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the up-projections from latent vectors to heads."""
        return [
            (self.query or model.hidden, model.heads * (model.head_dim + self.rotary)),
            (self.key_value, 2 * model.heads * model.head_dim),
        ]

    def parameters(self, model: ModelSpec) -> tuple[int, int]:
        """Return the parameters that tensor parallelism shards, and those replicated on every rank."""
        split = sum(inputs * outputs for inputs, outputs in self.matrices(model))
        return split + model.heads * model.head_dim * model.hidden, model.hidden * self.width


@dataclass(frozen=True)
class Work:
    """One optimiser step of a model.

    `latent` (MLA) and `next_tokens` (multi-token prediction: extra layers, each with the output head once more) exist only in
    other frameworks' models. `rule` is the optimiser, `rule_keys` its keys in the run spec. `reduced` is bytes of a gradient element while it is
    reduced (None: the stack's). `reshard`: ZeRO-3 frees a layer's gathered weights after its forward pass. `replayed`: passes may
    run as CUDA graphs, if the stack supports it (`replays`); `captured_only`: they have to, and with FSDP, tp and cp they may too.
    """

    model: ModelSpec
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    latent: Latent | None = None
    next_tokens: int = 0
    rule: Rule = DEFAULT
    rule_keys: Section | None = None
    reduced: float | None = None
    reshard: bool = True
    replayed: bool = True
    captured_only: bool = False
    # Losses of each sample, each with a gradient of the head until the backward pass. 0: one loss of the micro-batch.
    sample_losses: int = 0
    # The share of tokens that the task predicts, if not the architecture's.
    predicted: float | None = None
    # Names and tokens of a sample's other sequences, None for a length that only the data determines.
    other_lengths: tuple[tuple[str, int | None], ...] = ()
    # The largest number that divides every batch of a ramp-up. 0: every batch is the global batch.
    ramp_divisor: int = 0

    def can_capture(self, layout: Layout) -> bool:
        """Return whether a run that asks for CUDA graphs may have the layout: the rules of `config.layout.uncapturable`."""
        draws_again = self.model.dropout > 0 and layout.recompute != "none"
        sums_late = layout.zero > 0 and layout.copies > 1
        return layout.pp == layout.ep == 1 and not draws_again and not sums_late

    def replays(self, layout: Layout) -> bool:
        """Return whether passes of the layout run as CUDA graphs, which take no host time."""
        has_collectives = layout.zero > 0 or layout.tp * layout.cp > 1
        loops = self.model.loops_over_experts(self.precision, layout.expert_tp)
        can_capture = self.can_capture(layout) and not loops
        return self.replayed and can_capture and (self.captured_only or not has_collectives)

    @property
    def divided_batch(self) -> int:
        """Number of samples that micro-batch x data-parallel ranks has to divide."""
        return gcd(self.global_batch, self.ramp_divisor)

    def micro_batch_multiple(self, cp: int) -> int:
        """Number of samples of which a micro-batch has to be a multiple: the tokens of fp8 matmuls are aligned."""
        return fp8_micro_batch(self.lengths.values(), cp) if self.precision == "fp8" else 1

    @property
    def lengths(self) -> dict[str, int | None]:
        """Tokens of each sequence of a sample by name, None for a length that only the data determines."""
        return {"seq_len": self.seq_len, **dict(self.other_lengths)}

    def fp8_refusal(self, layout: Layout, *, has_open_micro_batch: bool = False) -> tuple[str, str] | None:
        """Return why fp8 matmuls cannot have the tokens of this layout, and a fix; None if they can, or are not asked for."""
        if self.micro_batch_multiple(layout.cp) == 1:
            return None
        size = None if has_open_micro_batch else layout.micro_batch
        return fp8_refusal(
            self.lengths, self.divided_batch, layout.dp, micro_batch=size, cp=layout.cp, ramped=self.ramp_divisor > 0
        )

    @cached_property
    def flops_per_token(self) -> float:
        return training_flops_per_token(self.model, self.seq_len, predicted=self.predicted)

    @property
    def tokens(self) -> int:
        """Number of tokens in a step, source and target tokens together for an encoder-decoder."""
        return round(self.seq_len * self.global_batch * (1 + self.sizes.decoder.targets))

    def micro_batches(self, layout: Layout) -> int:
        """Number of micro-batches in a step on one data-parallel rank (gradient accumulation steps)."""
        return max(1, round(self.global_batch / (layout.dp * layout.micro_batch)))

    @property
    def frozen(self) -> bool:
        """True if only adapters are trained (LoRA): the weights of the model have neither gradients nor optimiser state."""
        return self.model.lora is not None

    @property
    def decomposed(self) -> bool:
        """True if adapters have magnitudes too (DoRA)."""
        return self.model.lora is not None and self.model.lora.dora

    def adapters(self, layout: Layout) -> tuple[float, float]:
        """Return the parameters of adapter matrices, and the magnitudes, of an average layer on one rank.

        Tensor parallelism cuts one matrix of each pair, and the magnitudes of about half of the layers."""
        share = self.sizes.expert_layers
        both = zip(*adapter_parameters(self.model), strict=True)
        matrices, magnitudes = (
            ((1 - share) * dense + share * sparse) * (1 + 1 / layout.tp) / 2 for dense, sparse in both
        )
        return matrices, magnitudes

    def adapted(self, layout: Layout) -> list[tuple[float, float]]:
        """Return the inputs and outputs of the adapted linear layers of a block on one rank."""
        sizes, tp = self.sizes, layout.tp
        found = {
            "qkv": (sizes.hidden, (sizes.query + 2 * sizes.key_value) / tp),
            "out": (sizes.query / tp, sizes.hidden),
            **dict.fromkeys(("gate", "up"), (sizes.hidden, sizes.mlp_width / tp)),
            "down": (sizes.mlp_width / tp, sizes.hidden),
        }
        return [found[name] for name in adapted_layers(self.model) if all(found[name])]

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.model, self.latent, self.next_tokens, self.predicted)

    def __hash__(self) -> int:
        return hash((id(self.model), self.seq_len, self.global_batch, self.precision, self.latent, self.next_tokens))


@dataclass(frozen=True)
class Decoder:
    """The decoder of an encoder-decoder: its share of the layers, and target tokens for each source token."""

    share: float = 0.0
    targets: float = 0.0

    def mean(self, encoder: float, decoder: float) -> float:
        """Return the mean over all layers of a value that encoder and decoder layers have."""
        return (1 - self.share) * encoder + self.share * decoder


@dataclass(frozen=True)
class Sizes:
    """Parameters of an average layer, of embedding and output head, and the widths of activations.

    Widths are per source token. In an encoder-decoder the decoder's layers have fewer tokens and attend to two sequences, which
    changes the average.
    """

    layers: int
    hidden: int
    # Width of the residual stream.
    stream: float
    # Width of all query heads.
    query: float
    # Width of all key heads, and of all value heads.
    key_value: float
    # Width of the latent vectors of MLA.
    latent: int
    # Matmul parameters of attention that tensor parallelism shards.
    attention: float
    # Matmul parameters of a layer that every token uses: dense MLPs and shared experts.
    mlp: float
    # Matmul parameters of one routed expert.
    expert: int
    # Share of the layers that have experts.
    expert_layers: float
    # Norms and biases of a layer.
    other: float
    embedding: int
    head: int
    # Inner width of the MLP that every token uses.
    mlp_width: float
    # Inner width of all experts that a token is routed to.
    expert_width: float
    # Tokens the output head predicts for each source token.
    predicted: float
    decoder: Decoder


def sizes_of(
    model: ModelSpec, latent: Latent | None = None, next_tokens: int = 0, predicted: float | None = None
) -> Sizes:
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
    if latent is not None:
        # Queries and keys are wider than values. The mean width gives the same FLOPs and bytes.
        query = key_value = model.heads * (model.head_dim + latent.rotary // 2)
        attention, attention_other = latent.parameters(model)
    return Sizes(
        layers=layers,
        hidden=model.hidden,
        # A decoder layer has three residual blocks instead of two: self-attention, cross-attention, MLP.
        stream=model.hidden * decoder.mean(1, 1.5 * targets) * (1 + more_norms / 4),
        query=query * decoder.mean(1, 2 * targets),
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
        predicted=(targets or (kind.predicted if predicted is None else predicted)) * (1 + next_tokens),
        decoder=decoder,
    )


def stage_layers(work: Work, layout: Layout, *, levelled: bool = False) -> tuple[int, ...]:
    """Return the number of layers on each pipeline rank.

    Stages are equal, and the first ones have one layer more if the layers do not divide. With `levelled` they are those of Argosy's
    own pipelines, whose last stage has fewer layers to balance the output head.
    """
    return _held_layers(work, layout.pp, layout.vpp, layout.schedule, levelled)


@lru_cache(maxsize=1024)
def _held_layers(work: Work, pp: int, vpp: int, schedule: Schedule | None, levelled: bool) -> tuple[int, ...]:
    layers = work.sizes.layers
    stages = pp * (vpp if pp * vpp <= layers else 1)
    if levelled:
        sizes = _levelled(work, stages)
    else:
        each, over = divmod(layers, stages)
        sizes = tuple(each + (stage < over) for stage in range(stages))
    held = [0] * pp
    for stage, size in enumerate(sizes):
        held[rank_of_stage(schedule, pp, stage)] += size
    return tuple(held)


@lru_cache
def _levelled(work: Work, stages: int) -> tuple[int, ...]:
    return tuple(map(len, split_layers(work.model, stages, work.seq_len)))

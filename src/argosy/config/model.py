"""The model spec: one description from which every family is built, counted, planned and exported.

A family (`gpt`, `llama`, `mpt`, `gemma3`, `bert`, `t5`) fixes the structural choices; a preset adds the sizes; a run spec may
override any of them. `argosy.families` holds both.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from argosy.config.units import Count, Depth, Fraction, Multiple, NotNegative, Positive, PositiveNumber, Whole

ROPE_THETA = 10_000.0
# A GPU's grouped matmul of experts is for bf16 and widths that are multiples of this: it reads rows in units of 16 bytes.
GROUPED_MULTIPLE = 8
NEEDS_ROWS = f"the host has to know how many rows each expert gets, except in bf16 with widths that are multiples of {GROUPED_MULTIPLE}"


class Section(BaseModel):
    """Every part of the run spec: unknown keys are errors, values cannot be changed once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _whole(value: Any) -> Any:
    """Return 64, 64.0 and "64" as the integer 64, as the fields parse them, and any other value unchanged."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


class MoESpec(Section):
    """Mixture of experts: which layers have it, how tokens are routed, and how large an expert is."""

    experts: Positive = Field(description="routed experts in a layer")
    top_k: Positive = Field(description="experts each token is sent to")
    ffn: Positive = Field(description="inner width of one expert")
    shared_experts: Whole = Field(0, description="experts every token passes through")
    dense_layers: Whole = Field(0, description="leading layers that keep a dense MLP")
    shared_gate: bool = Field(False, description="weigh the shared experts by a sigmoid of the token (Qwen2-MoE)")
    router: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="function that turns the router's logits into scores of the experts"
    )
    norm_topk: bool = Field(True, description="divide the chosen experts' scores by their sum")
    routed_scale: PositiveNumber = Field(1.0, description="factor of the routed experts' sum")
    groups: Positive = Field(1, description="groups of experts, of which a token may use `top_groups` (DeepSeek-V3)")
    top_groups: Positive = Field(1, description="groups each token may use")
    balance_loss: NotNegative = Field(
        0.01, description="weight of each layer's load-balancing loss, 1 if all experts get equally many tokens"
    )
    z_loss: NotNegative = Field(0.0, description="weight of each layer's router z-loss")
    bias_rate: NotNegative | None = Field(
        None, description="step of the bias that levels loads without a loss (DeepSeek-V3: 0.001); null: no bias"
    )

    @model_validator(mode="after")
    def _check_routing(self) -> MoESpec:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}: use at most {self.experts}")
        if self.shared_gate and not self.shared_experts:
            raise ValueError("shared_gate weighs shared experts, and shared_experts is 0: give one or the other")
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        if self.top_groups > self.groups:
            raise ValueError(
                f"top_groups {self.top_groups} is more than groups {self.groups}: use at most {self.groups}"
            )
        if self.groups == 1:
            return
        if self.experts % self.groups or self.experts < 2 * self.groups:
            raise ValueError(
                f"experts {self.experts} do not make {self.groups} equal groups of two or more: "
                f"use groups that divide {self.experts}, at most {self.experts // 2}"
            )
        within = self.top_groups * (self.experts // self.groups)
        if self.top_k > within:
            raise ValueError(
                f"top_k {self.top_k} is more than the {within} experts in top_groups {self.top_groups} of "
                f"{self.experts // self.groups}: raise top_groups"
            )


class RopeScaling(Section):
    """Rotary frequencies stretched to sequences longer than those first trained on."""

    kind: Literal["linear", "llama3"] = Field(
        description="linear: all by the factor; llama3: long waves by the factor, short ones not, a ramp between"
    )
    factor: PositiveNumber = Field(description="scaling factor: stretched frequencies are divided by it")
    low_freq_factor: PositiveNumber = Field(
        1.0, description="llama3: waves longer than original_seq_len / this are stretched"
    )
    high_freq_factor: PositiveNumber = Field(
        4.0, description="llama3: waves shorter than original_seq_len / this are kept"
    )
    original_seq_len: Positive | None = Field(None, description="llama3: the sequence length first trained on")

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.kind == "llama3" and self.original_seq_len is None:
            raise ValueError("llama3 scaling needs original_seq_len: give the length first trained on, as 8192")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} is not above low_freq_factor {self.low_freq_factor:g}: "
                "Llama 3 has 4 and 1"
            )
        return self


class RetrievalSpec(Section):
    """Two towers on an encoder, one for queries and one for blocks, whose vectors are compared."""

    shared: bool = Field(False, description="one encoder for queries and blocks")
    projection: Positive | None = Field(None, description="width of the vectors compared; without it, the hidden width")


class LoraSpec(Section):
    """Low-rank adapters (LoRA): the model's own weights are frozen, and two small matrices beside each are trained."""

    rank: Positive = Field(description="rank of the adapters: the inner size of the two matrices")
    alpha: PositiveNumber = Field(16.0, description="the adapters' output is multiplied by alpha / rank")
    targets: list[Literal["qkv", "out", "gate", "up", "down"]] | None = Field(
        None,
        min_length=1,
        description="linear layers of each block that have adapters: qkv (queries, keys and values), out, gate, up, down; default: all",
    )

    dora: bool = Field(
        False,
        description="weight-decomposed adapters (DoRA, PEFT's use_dora): also train the norm of every row of an adapted weight, "
        "and let the adapters change only its direction",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelSpec(Section):
    """The architecture. Sizes not given follow from the others, and are shown as derived."""

    family: Literal["gpt", "llama", "mpt", "gemma3", "bert", "t5"] = Field(
        description="structural defaults to start from"
    )
    preset: str | None = Field(None, description="a named model; see `argosy config models`")
    layers: Depth = Field(description="transformer blocks (in the encoder, for T5)")
    hidden: Positive = Field(description="width of the residual stream")
    heads: Positive = Field(description="attention heads")
    kv_heads: Positive = Field(description="key/value heads; fewer than heads is grouped-query attention")
    head_dim: Positive = Field(description="width of one head; hidden / heads unless given")
    ffn: Positive = Field(description="inner width of the MLP; 4 x hidden unless given")
    vocab_size: Count = Field(
        description="rows of the token embedding; without a preset, the size of the tokenizer of the corpus, if that is on this machine"
    )
    vocab_multiple: Multiple = Field(
        128,
        description="the output head's matmul has a multiple of this many rows on each tensor-parallel rank, which is faster; "
        "the rows beyond vocab_size are zeros that no parameter, loss or checkpoint has; 1: no such rows",
    )
    max_seq_len: Positive = Field(description="longest sequence the model is meant for")

    architecture: Literal["decoder", "encoder", "encoder-decoder"] = Field(
        description="decoder: causal attention; encoder: bidirectional; encoder-decoder: both, with cross-attention"
    )
    positions: Literal["learned", "rope", "alibi", "relative"] = Field(description="how order is encoded")
    norm: Literal["layernorm", "rmsnorm"] = Field(description="normalisation")
    norm_bias: bool = Field(description="whether norms have a bias")
    norm_eps: PositiveNumber = Field(description="added to the variance in norms")
    norm_centred: bool = Field(False, description="whether weights of norms are offsets from one (Gemma)")
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = Field(
        description="MLP non-linearity; swiglu and geglu are gated"
    )
    attention_bias: bool = Field(description="biases in the query, key, value and output projections")
    mlp_bias: bool = Field(description="biases in the MLP")
    tied: bool = Field(description="whether the output head reuses the token embedding")

    embed_scale: bool = Field(False, description="multiply token vectors by sqrt(hidden) (Gemma)")
    qk_norm: bool = Field(False, description="normalise each query and key head (Qwen3)")
    window: Positive | None = Field(None, description="sliding attention window, in tokens")
    global_every: Positive | None = Field(
        None, description="with a window: every so many layers, one sees the whole sequence (Gemma 3: 6)"
    )
    query_pre_attn_scalar: Positive | None = Field(
        None, description="attention scores are divided by its square root; head_dim unless given"
    )
    rope_theta: PositiveNumber = Field(ROPE_THETA, description="base of the rotary frequencies")
    local_rope_theta: PositiveNumber | None = Field(
        None, description="base of the rotary frequencies in layers with a window, unscaled; rope_theta unless given"
    )
    rope_scaling: RopeScaling | None = Field(None, description="rotary frequencies for longer sequences")
    dropout: Fraction = Field(0.0, description="on embeddings, attention and residuals")
    embed_noise: NotNegative = Field(
        0.0,
        description="NEFTune: while training, uniform noise of at most embed_noise / sqrt(seq_len x hidden) is added to embeddings; for example 5",
    )
    init_std: PositiveNumber = Field(
        0.02,
        description="standard deviation of fresh weights; in T5 a factor on those that follow from each matrix's inputs",
    )
    moe: MoESpec | None = Field(None, description="mixture of experts")
    lora: LoraSpec | None = Field(None, description="low-rank adapters; only they are trained (decoders)")
    decoder_layers: Depth | None = Field(None, description="T5: blocks in the decoder")
    type_vocab_size: Positive | None = Field(None, description="BERT: segment types")
    pair: Literal["nsp", "sop", "none"] | None = Field(
        None,
        description="BERT: what is asked of the segments A and B: nsp (does B follow A?), sop (in this order?), or none",
    )
    retrieval: RetrievalSpec | None = Field(None, description="BERT: two towers, trained by the inverse cloze task")

    @model_validator(mode="before")
    @classmethod
    def _derive_sizes(cls, data: Any) -> Any:
        """Fill in sizes that follow from others. Wrong types pass through, so that the field checks name them."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        hidden, heads = _whole(data.get("hidden")), _whole(data.get("heads"))
        if data.get("kv_heads") is None and heads is not None:
            data["kv_heads"] = heads
        if data.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            if hidden % heads:
                near = [n for n in range(max(1, heads - 64), heads + 64) if hidden % n == 0]
                closest = sorted(sorted(near, key=lambda n: abs(n - heads))[:2])
                raise ValueError(
                    f"hidden {hidden} is not divisible by heads {heads} ({hidden} / {heads} = {hidden / heads:.2f}): "
                    f"use heads {' or '.join(map(str, closest)) or 1}, or give head_dim"
                )
            data["head_dim"] = hidden // heads
        if data.get("ffn") is None and isinstance(hidden, int):
            data["ffn"] = 4 * hidden
        if data.get("architecture") == "encoder-decoder" and data.get("decoder_layers") is None:
            data["decoder_layers"] = data.get("layers")
        return data

    @model_validator(mode="after")
    def _check_shape(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: "
                f"set model.kv_heads to {self.heads}, or to what divides it"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head_dim, not {self.head_dim}: set model.head_dim, or hidden and heads"
            )
        self._check_family()
        self._check_experts()
        self._check_adapters()
        return self

    def _check_family(self) -> None:
        """Refuse choices that would be ignored or give an unintended model."""
        allowed = {"decoder": ("learned", "rope", "alibi"), "encoder": ("learned",), "encoder-decoder": ("relative",)}
        if self.positions not in allowed[self.architecture]:
            raise ValueError(
                f"positions {self.positions!r} do not go with the architecture {self.architecture}: use {' or '.join(allowed[self.architecture])}"
            )
        if self.window is not None and self.architecture != "decoder":
            raise ValueError(
                f"a window of keys behind the query has no meaning in the architecture {self.architecture}: leave it out"
            )
        if self.rope_scaling is not None and self.positions != "rope":
            raise ValueError(
                f"rope_scaling stretches rotary positions, and these are {self.positions!r}: set model.rope_scaling=null"
            )
        if self.rope_theta != ROPE_THETA and self.positions != "rope":
            raise ValueError(
                f"rope_theta {self.rope_theta:g} is of rotary positions, and these are {self.positions!r}: "
                f"leave it out, or set model.rope_theta={ROPE_THETA:g}"
            )
        for key in ("global_every", "local_rope_theta"):
            if getattr(self, key) is not None and (self.window is None or self.positions != "rope"):
                raise ValueError(
                    f"{key} is for layers with a window and rotary positions: set model.window, or leave it out"
                )
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError("a norm of kind rmsnorm has no norm_bias: set model.norm_bias=false")
        only = {"type_vocab_size": "encoder", "pair": "encoder", "retrieval": "encoder"}
        only["decoder_layers"] = "encoder-decoder"
        for key, architecture in only.items():
            if getattr(self, key) is not None and self.architecture != architecture:
                raise ValueError(f"{key} has no meaning in the architecture {self.architecture}: leave it out")
        if self.retrieval is not None and self.judges_pairs:
            raise ValueError(f"a model with retrieval has no head for the pair {self.pair!r}: set model.pair=none")
        if self.retrieval is not None and not self.tied:
            raise ValueError(
                "tied is false, and a model with retrieval has no output head to keep apart: leave tied out"
            )

    def _check_adapters(self) -> None:
        if self.lora is None:
            return
        if self.architecture != "decoder":
            raise ValueError(f"lora adapts decoders, and this is an {self.architecture}: leave lora out")
        if not self.gated and "gate" in (self.lora.targets or ()):
            raise ValueError(f"lora.targets names gate, and an MLP with {self.activation} has none: leave it out")
        dense = self.moe is None or self.moe.dense_layers > 0 or self.moe.shared_experts > 0
        if not dense and self.lora.targets is not None and not {"qkv", "out"} & set(self.lora.targets):
            names = ", ".join(self.lora.targets)
            raise ValueError(f"lora.targets names {names}, and experts have no adapters: add qkv or out")

    def _check_experts(self) -> None:
        if self.moe is None:
            return
        if self.architecture != "decoder":
            raise ValueError(f"moe is for decoders, not for the architecture {self.architecture}: leave it out")
        if self.mlp_bias:
            raise ValueError("experts have no biases: set model.mlp_bias=false")
        if self.moe.dense_layers >= self.layers:
            raise ValueError(
                f"moe.dense_layers {self.moe.dense_layers} leaves none of {self.layers} layers for experts: "
                f"use at most {self.layers - 1}, or leave moe out"
            )

    def padded_vocab(self, tp: int = 1) -> int:
        """Return the rows of the output head's matmul on `tp` tensor-parallel ranks together."""
        each = self.vocab_multiple * tp
        return -(-self.vocab_size // each) * each

    def loops_over_experts(self, precision: str, tp: int) -> bool:
        """Return whether a GPU has no grouped matmul for the experts, so that the host has to know how many rows each gets."""
        if self.moe is None:
            return False
        # The experts of an 8-bit model are computed in bf16.
        widths = self.hidden, self.moe.ffn // tp
        return precision not in ("bf16", "fp8") or any(width % GROUPED_MULTIPLE for width in widths)

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def norm_start(self) -> float:
        """Return the initial value of a norm's weights."""
        return 0.0 if self.norm_centred else 1.0

    @property
    def judges_pairs(self) -> bool:
        return self.pair in ("nsp", "sop")

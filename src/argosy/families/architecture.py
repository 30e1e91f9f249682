"""The architectures a model may have: decoder, encoder, retriever, encoder-decoder.

Code that treats architectures differently reads a property of these objects and never compares names. They are plain facts
without torch: the modules that pipeline stages are cut from, the layers that are counted, the layouts that are possible.

The layer plan has the properties that may differ from layer to layer of a model. The model is built from its plan, and the
parameter counts and the planner read it too. Layers with the same kind of attention share one attention mask and one rope table
in each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from argosy.config.model import ModelSpec, RopeScaling

# T5's relative position buckets.
RELATIVE_BUCKETS = 32
# The share of tokens that BERT masks, the default of data.bert.mask_rate. The output head runs only on these.
PREDICTED_SHARE = 0.15


@dataclass(frozen=True)
class Modules:
    """The names of a model's modules, in the order a token passes through them."""

    begin: tuple[str, ...]
    blocks: tuple[str, ...]
    end: tuple[str, ...]
    # Further modules that a block needs on its pipeline stage.
    beside: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ends:
    """The number of parameters outside the blocks and the embedding: matmuls on each token, norms, and others."""

    matmul: int = 0
    norms: int = 0
    other: int = 0


@dataclass(frozen=True)
class Architecture:
    """The properties of an architecture.

    `writes_text` is True if the model generates one token after another. `has_vocabulary` is True if it has an output head
    over the vocabulary. `fan_in_init` scales initial weights by the width of each matrix's input, as T5 does. `uncuttable`
    says why context parallelism cannot cut its sequences, or is None. `planned` is False if the planner cannot choose a
    layout for it. `predicted` is the share of the tokens that the output head runs on, unless the task's settings say another.
    """

    name: str
    causal: bool = False
    writes_text: bool = True
    two_sequences: bool = False
    has_vocabulary: bool = True
    normed_embedding: bool = False
    fan_in_init: bool = False
    uncuttable: str | None = None
    planned: bool = True
    predicted: float = 1.0

    def stacks(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the number of layers of each stack, the encoder's first."""
        return (spec.layers,)

    def towers(self, spec: ModelSpec) -> int:
        """Return the number of towers: full copies of the encoder, each with its own weights."""
        return 1

    def ends(self, spec: ModelSpec) -> Ends:
        raise NotImplementedError

    def modules(self, spec: ModelSpec) -> Modules:
        raise NotImplementedError


class _Decoder(Architecture):
    def ends(self, spec: ModelSpec) -> Ends:
        return Ends(norms=1)

    def modules(self, spec: ModelSpec) -> Modules:
        return Modules(_embedding("embed"), _blocks("layers", spec.layers), ("norm", _output(spec, "embed", "head")))


class _Encoder(Architecture):
    def ends(self, spec: ModelSpec) -> Ends:
        """Count the embedding's norm, the head's transform with its norm and biases, and the pooler and pair classifier."""
        other = spec.hidden + spec.vocab_size
        if spec.judges_pairs:
            other += spec.hidden * spec.hidden + spec.hidden + 2 * spec.hidden + 2
        return Ends(matmul=spec.hidden * spec.hidden, norms=2, other=other)

    def modules(self, spec: ModelSpec) -> Modules:
        output = _output(spec, "encoder.embed", "output")
        return Modules(
            _embedding("encoder.embed"), _blocks("encoder.layers", spec.layers), ("head", "pair", output)
        )  # fmt: skip


class _Retriever(_Encoder):
    def towers(self, spec: ModelSpec) -> int:
        return 1 if spec.retrieval is None or spec.retrieval.shared else 2

    def ends(self, spec: ModelSpec) -> Ends:
        """Count the embedding's norm, and the projection, which only the first token of a sequence passes through."""
        width = spec.retrieval.projection if spec.retrieval is not None else None
        return Ends(norms=1, other=0 if width is None else spec.hidden * width + width)


class _EncoderDecoder(Architecture):
    def stacks(self, spec: ModelSpec) -> tuple[int, ...]:
        return spec.layers, spec.decoder_layers or spec.layers

    def ends(self, spec: ModelSpec) -> Ends:
        return Ends(norms=2, other=2 * RELATIVE_BUCKETS * spec.heads)

    def modules(self, spec: ModelSpec) -> Modules:
        """Return the modules. A stack's relative position bias is on every pipeline stage that has one of its blocks."""
        first, second = self.stacks(spec)
        encoder, decoder = _blocks("encoder.layers", first), _blocks("decoder.layers", second)
        beside: dict[str, tuple[str, ...]] = dict.fromkeys(encoder, ("encoder.relative",))
        beside |= dict.fromkeys(decoder, ("decoder.relative",)) | {encoder[-1]: ("encoder.relative", "encoder.norm")}
        end = ("decoder.norm", _output(spec, "embed", "head"))
        return Modules(_embedding("embed"), encoder + decoder, end, beside)


def _embedding(path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{module}" for module in ("tokens", "positions", "types", "norm"))


def _blocks(path: str, layers: int) -> tuple[str, ...]:
    return tuple(f"{path}.{i}" for i in range(layers))


def _output(spec: ModelSpec, embedding: str, own: str) -> str:
    return f"{embedding}.tokens" if spec.tied else own


_JUDGED_WHOLE = "an encoder's heads read the first token or masked positions of the whole sequence"
DECODER = _Decoder("decoder", causal=True)
ENCODER = _Encoder(
    "encoder", writes_text=False, normed_embedding=True, uncuttable=_JUDGED_WHOLE,
    predicted=PREDICTED_SHARE,
)  # fmt: skip
RETRIEVER = _Retriever(
    "retriever", writes_text=False, has_vocabulary=False, normed_embedding=True,
    uncuttable=_JUDGED_WHOLE, predicted=PREDICTED_SHARE,
)  # fmt: skip
ENCODER_DECODER = _EncoderDecoder(
    "encoder-decoder", two_sequences=True, fan_in_init=True, planned=False,
    uncuttable="an encoder-decoder has two sequences with attention between them",
)  # fmt: skip
_BY_KEY = {kind.name: kind for kind in (DECODER, ENCODER, ENCODER_DECODER)}


def architecture_of(spec: ModelSpec) -> Architecture:
    """Return the architecture of a model: the one its key names, or a retriever, which is an encoder with `retrieval`."""
    return RETRIEVER if spec.retrieval is not None else _BY_KEY[spec.architecture]


# pre: x + f(norm(x)). post: norm(x + f(x)), BERT's. sandwich: x + norm(f(norm(x))), Gemma's.
NormPlacement = Literal["pre", "post", "sandwich"]
NORMS_OF_A_BLOCK: dict[NormPlacement, int] = {"pre": 2, "post": 2, "sandwich": 4}


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention: its window, its rope settings, and the `scale` of the scores (None: 1 / sqrt(head_dim))."""

    window: int | None
    rope_theta: float
    rope_scaling: RopeScaling | None
    scale: float | None = None


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer: its kind of attention and the placement of its norms."""

    attention: AttentionKind
    norms: NormPlacement = "pre"


def attention_kind(spec: ModelSpec, *, local: bool) -> AttentionKind:
    """Return the attention that a spec describes, for a layer with the window (`local`) or for a global layer."""
    scale = None if spec.query_pre_attn_scalar is None else spec.query_pre_attn_scalar**-0.5
    if local and spec.local_rope_theta is not None:
        return AttentionKind(spec.window, spec.local_rope_theta, None, scale)
    return AttentionKind(spec.window if local else None, spec.rope_theta, spec.rope_scaling, scale)


def plan_layers(spec: ModelSpec, norms: NormPlacement = "pre") -> tuple[LayerPlan, ...]:
    """Return the plan that a spec describes: identical layers, or, with `global_every` = n, every n-th layer global."""
    local = LayerPlan(attention_kind(spec, local=spec.window is not None), norms)
    if spec.global_every is None:
        return (local,) * spec.layers
    everywhere = LayerPlan(attention_kind(spec, local=False), norms)
    return tuple(local if (i + 1) % spec.global_every else everywhere for i in range(spec.layers))

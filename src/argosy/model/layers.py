"""The layers every model is made of: linear, norm, self-attention, cross-attention, MLP.

The query, key and value projections are one matrix, laid out group by group: for each KV head its query heads, then its
key, then its value. Cutting the rows into equal tensor-parallel shards therefore never cuts a head.

The operation that reads a matmul's output adds the bias, which costs nothing there. `Linear` holds `weight` and `bias`,
but its forward pass is the matmul alone. `Linear.add_to` adds both to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelSpec
from argosy.families.architecture import LayerPlan, architecture_of
from argosy.model.ops.activation import activate, gated
from argosy.model.ops.beside import may_serve, serves
from argosy.model.ops.choice import use_kernel
from argosy.model.ops.fp8 import fp8_matmuls, is_whole
from argosy.model.ops.fp8_mlp import fp8_mlp
from argosy.model.ops.heads import project_heads, rotate
from argosy.model.ops.low_rank import nonzero, squared_norms
from argosy.model.ops.matmul import matmuls
from argosy.model.ops.mlp import gated_mlp, serves_mlp
from argosy.model.ops.norm import add, add_norm, norm, split_norm
from argosy.model.ops.product_sum import product_sum
from argosy.model.positions import Across, Context
from argosy.model.sharding import INSIDE, OUTSIDE, VOCABULARY, Declaration, Dropout, Noise, column, row, shardable


class Linear(nn.Linear):
    """A linear layer that computes x weight^T and adds only the bias its caller passes.

    Usually the operation that reads the result adds the bias.
    """

    weight, bias = shardable("weight"), shardable("bias")
    # Low-rank adapters, where `argosy.model.adapters` adds them, and the factor of their output. With `dora`, also the norms of rows.
    lora_a, lora_b, lora_magnitude = shardable("lora_a"), shardable("lora_b"), shardable("lora_magnitude")
    lora_scale: float | None = None
    dora = False
    # Sums a tensor over the ranks that share the input features. `argosy.parallel` sets it where these are cut.
    sum_inputs: Callable[[Tensor], Tensor] | None = None
    # Use fp8 matmuls while training. `argosy.parallel` sets it.
    fp8 = False

    @property
    def rounds(self) -> bool:
        """True if this pass rounds the input, the weight and their gradients to 8 bits."""
        return self.fp8 and self.training

    @property
    def fuses(self) -> bool:
        """True if this pass is a matmul of 8-bit floats and nothing else, which a fused operation may do in its place."""
        return self.rounds and self.lora_scale is None

    @property
    def plain(self) -> bool:
        """True if this pass is a matmul without 8-bit floats or adapters, which a fused operation may do in its place."""
        return not self.rounds and self.lora_scale is None

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised; `argosy.model.build` fills them. On the meta device drawing takes longer than all else."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply(x, [self], [bias])[0]

    def adds_to(self, stream: Tensor) -> bool:
        """Return whether the kernel of this pass's matmul can add its result to the residual stream."""
        return self.plain and use_kernel(stream) and serves(stream, self.weight)

    def add_to(self, stream: Tensor | None, x: Tensor) -> Tensor:
        """Return the output without its bias, or if there is a residual stream, the stream with the output and its bias added to it."""
        return self(x) if stream is None else product_sum(stream, x, self.weight, self.bias)


def multiply(x: Tensor, layers: Sequence[Linear], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the outputs of several layers on one input, sharing the work that they have in common."""
    # DoRA scales a layer's output, to which a bias does not belong yet.
    early = [None if layer.dora else bias for layer, bias in zip(layers, biases, strict=True)]
    found = (fp8_matmuls if layers[0].rounds else matmuls)(x, [layer.weight for layer in layers], early)
    if layers[0].lora_scale is None and layers[-1].lora_scale is None:
        return found
    return tuple(_adapted(y, x, layer, bias) for y, layer, bias in zip(found, layers, biases, strict=True))


def _adapted(y: Tensor, x: Tensor, layer: Linear, bias: Tensor | None) -> Tensor:
    """Return y plus the output of the layer's adapters, if it has any. With DoRA, y is without the bias, which is added here."""
    if layer.lora_scale is None:
        return y
    [inner] = matmuls(x, [layer.lora_a], [None])
    [more] = matmuls(inner, [layer.lora_b], [None])
    y = torch.add(y, more, alpha=layer.lora_scale)
    if not layer.dora:
        return y
    y = y * (layer.lora_magnitude / _row_norms(layer))
    return y if bias is None else y + bias


@torch.no_grad()
def _row_norms(layer: Linear) -> Tensor:
    """Return the norms of the rows of a layer's weight with its adapters, a constant to the backward pass (DoRA, section 4.3)."""
    squares = squared_norms(layer.weight, layer.lora_a, layer.lora_b, layer.lora_scale or 0.0)
    if layer.sum_inputs is not None:
        squares = layer.sum_inputs(squares)
    # In the precision of the magnitudes, whose rounding it then shares: their quotient begins at one, or in 16 bits next to it.
    return nonzero(squares.clamp_min(0).sqrt().to(layer.lora_magnitude.dtype))


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.rms, self.eps = spec.norm == "rmsnorm", spec.norm_eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if spec.norm_bias else None
        self.centred = spec.norm_centred
        # Matmuls in 8-bit floats read what this norm writes, in both passes. `argosy.parallel` sets it.
        self.measured = False

    @property
    def scale(self) -> Tensor:
        """The factor of the normalised values. An offset from one is added in 32 bits: 16 would round it away."""
        return 1 + self.weight.float() if self.centred else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.scale, self.bias, eps=self.eps, rms=self.rms, measured=self._measures)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and its norm."""
        return split_norm(x, self.scale, self.bias, eps=self.eps, rms=self.rms, measured=self._measures)

    def add(self, x: Tensor, y: Tensor, y_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y + y_bias and its norm."""
        return add_norm(x, y, y_bias, self.scale, self.bias, eps=self.eps, rms=self.rms, measured=self._measures)

    @property
    def _measures(self) -> bool:
        return self.measured and self.training


class Attention(nn.Module):
    """Self-attention: one matmul for queries, keys and values, optional norms on the heads, and the output projection."""

    tensor_parallel: ClassVar[Declaration] = {
        **column("qkv"), **row("out"), "q_norm": INSIDE, "k_norm": INSIDE,
    }  # fmt: skip

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        # A kernel may multiply and apply rope. `argosy.parallel` forbids it where the backward pass does only the latter again.
        self.fuses_rope = True
        # Query heads per KV head.
        self.group = spec.heads // spec.kv_heads
        self.qkv = Linear(spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.attention_bias)
        self.out = Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.attention_bias)
        self.q_norm = Norm(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = Norm(spec, spec.head_dim) if spec.qk_norm else None

    def forward(self, x: Tensor, context: Context, stream: Tensor | None = None) -> Tensor:
        """Return the attention output [batch, seq, hidden], without the output projection's bias; or the sum of the residual stream, the
        output and the bias."""
        normed = self.q_norm is not None
        q, k, v = project_heads(
            self.qkv, x, None if normed else context.rope, group=self.group, head_dim=self.head_dim, apart=normed, fused=self.fuses_rope
        )  # fmt: skip
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            if context.rope is not None:
                q, k = rotate(q, context.rope), rotate(k, context.rope)
        y = context.attend(q, k, v)
        return self.out.add_to(stream, y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention from the queries of one sequence to the keys and values of another.

    The rows of `kv` are laid out head by head: the key, then the value.
    """

    tensor_parallel: ClassVar[Declaration] = {**column("q"), **column("kv"), **row("out")}

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q = Linear(spec.hidden, spec.heads * spec.head_dim, bias=spec.attention_bias)
        self.kv = Linear(spec.hidden, 2 * spec.kv_heads * spec.head_dim, bias=spec.attention_bias)
        self.out = Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.attention_bias)

    def forward(self, x: Tensor, across: Across) -> Tensor:
        """Return the attention output [batch, seq, hidden], without the output projection's bias."""
        q = self.q(x, self.q.bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.kv(across.memory, self.kv.bias).unflatten(-1, (-1, 2, self.head_dim)).unbind(3)
        y = across.attend(q, k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """The feed-forward layer, gated or not."""

    tensor_parallel: ClassVar[Declaration] = {**column("gate"), **column("up"), **row("down")}

    def __init__(self, spec: ModelSpec, ffn: int | None = None) -> None:
        super().__init__()
        ffn = ffn or spec.ffn
        self.activation = spec.activation
        self.gate = Linear(spec.hidden, ffn, bias=spec.mlp_bias) if spec.gated else None
        self.up = Linear(spec.hidden, ffn, bias=spec.mlp_bias)
        self.down = Linear(ffn, spec.hidden, bias=spec.mlp_bias)
        # A kernel may multiply and compute the activation. `argosy.parallel` forbids it where the backward pass does only the latter again.
        self.fuses_activation = True

    def forward(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """Return the MLP output [batch, seq, hidden], without the down projection's bias; or the sum of the residual stream, the output
        and the bias."""
        fused = self._fused(x, stream) if use_kernel(x) else None
        if fused is not None:
            return fused
        if self.gate is None:
            y = activate(self.activation, self.up(x), self.up.bias)
        else:
            gate, up = multiply(x, (self.gate, self.up), (self.gate.bias, self.up.bias))
            y = gated(self.activation, gate, up)
        return self.down.add_to(stream, y)

    def _fused(self, x: Tensor, stream: Tensor | None = None) -> Tensor | None:
        """Return what `forward` does by fused kernels, or None where there are none."""
        inner = (self.up,) if self.gate is None else (self.gate, self.up)
        layers = (*inner, self.down)
        if all(layer.fuses for layer in layers) and is_whole(x):
            weights, biases = [layer.weight for layer in inner], [layer.bias for layer in inner]
            return fp8_mlp(x, self.activation, weights, biases, self.down.weight)
        if self.gate is None or not self.fuses_activation or not all(layer.plain for layer in layers):
            return None
        if any(layer.bias is not None for layer in layers) or not may_serve(x):
            return None
        factors = (self.gate.weight, self.up.weight, self.down.weight)
        return gated_mlp(x, self.activation, *factors, stream) if serves_mlp(x, *factors) else None


class AttentionBlock(nn.Module):
    """The first half of a block: x + attn(norm(x)), and the norm that the second half reads.

    In the decoder of an encoder-decoder it also has cross-attention to the encoder's output. With sandwich norms, the
    output of attention is normalised before it is added to the residual stream.
    """

    tensor_parallel: ClassVar[Declaration] = dict.fromkeys(
        ("attn_norm", "attn_post_norm", "cross_norm", "mlp_norm", "mlp_post_norm"), OUTSIDE
    )
    # The kernels of matmuls may add to the residual stream. `argosy.parallel` forbids it where something comes in between.
    fuses_sums = True

    def __init__(self, spec: ModelSpec, layer: LayerPlan, *, across: bool = False) -> None:
        super().__init__()
        sandwich = layer.norms == "sandwich"
        self.dropout = Dropout(spec.dropout)
        self.attn_norm = Norm(spec, spec.hidden)
        self.attn = Attention(spec)
        self.attn_post_norm = Norm(spec, spec.hidden) if sandwich else None
        self.cross_norm = Norm(spec, spec.hidden) if across else None
        self.cross = CrossAttention(spec) if across else None
        self.mlp_norm = Norm(spec, spec.hidden)
        self.mlp_post_norm = Norm(spec, spec.hidden) if sandwich else None

    def attend(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and its norm."""
        x, h = self.attn_norm.split(x)
        if self.cross is None and self._adds(self.attn.out, x, self.attn_post_norm):
            return self.mlp_norm.split(self.attn(h, context, x))
        y, bias = self.drop(*normed(self.attn_post_norm, self.attn(h, context), self.attn.out.bias))
        if self.cross is not None and self.cross_norm is not None and context.across is not None:
            x, h = self.cross_norm.add(x, y, bias)
            y, bias = self.drop(self.cross(h, context.across), self.cross.out.bias)
        return self.mlp_norm.add(x, y, bias)

    def _adds(self, layer: Linear, stream: Tensor, post_norm: Norm | None) -> bool:
        """Return whether a layer's matmul adds its output to the residual stream: nothing comes in between."""
        return self.fuses_sums and post_norm is None and not self.dropout.active and layer.adds_to(stream)

    def drop(self, y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Apply dropout to y + bias, and return it with None for the bias. Without dropout, return y and bias unchanged."""
        if not self.dropout.active:
            return y, bias
        return self.dropout(y if bias is None else y + bias), None


def normed(norm: Norm | None, y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return norm(y + bias) with None for the bias, or y and bias unchanged if there is no norm."""
    if norm is None:
        return y, bias
    out: Tensor = norm(y if bias is None else y + bias)
    return out, None


class Block(AttentionBlock):
    """A pre-norm block with attention and an MLP: x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, layer: LayerPlan, *, across: bool = False) -> None:
        super().__init__(spec, layer, across=across)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = self.attend(x, context)
        if self._adds(self.mlp.down, x, self.mlp_post_norm):
            out: Tensor = self.mlp(h, x)
            return out
        return add(x, *self.drop(*normed(self.mlp_post_norm, self.mlp(h), self.mlp.down.bias)))


class PostNormBlock(Block):
    """A post-norm block, as BERT has it: x = norm(x + attn(x)), then x = norm(x + mlp(x))."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        _, x = self.attn_norm.add(x, *self.drop(self.attn(x, context), self.attn.out.bias))
        _, x = self.mlp_norm.add(x, *self.drop(self.mlp(x), self.mlp.down.bias))
        return x


class Table(nn.Embedding):
    """An embedding table: maps an index to a vector."""

    weight = shardable("weight")

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised, as `Linear` does. To draw them on the meta device, torch would load its compiler."""

    def forward(self, numbers: Tensor) -> Tensor:
        return embed(numbers, self.weight)


class Together(nn.Identity):
    """The place where sequence parallelism all-gathers the tokens of a sequence. Otherwise it does nothing."""


class Embedding(nn.Module):
    """The input embedding: token vectors, plus learned positions and segment types where the model has them.

    BERT's is normalised afterwards.
    """

    tensor_parallel: ClassVar[Declaration] = {
        "tokens": VOCABULARY, "positions": OUTSIDE, "types": OUTSIDE, "norm": OUTSIDE,
    }  # fmt: skip

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout, self.noise = Dropout(spec.dropout), Noise(spec.embed_noise)
        self.scale = spec.hidden**0.5 if spec.embed_scale else None
        self.tokens = Table(spec.vocab_size, spec.hidden)
        self.positions = Table(spec.max_seq_len, spec.hidden) if spec.positions == "learned" else None
        self.types = Table(spec.type_vocab_size, spec.hidden) if spec.type_vocab_size else None
        self.norm = Norm(spec, spec.hidden) if architecture_of(spec).normed_embedding else None

    def forward(self, tokens: Tensor, positions: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.scale is not None:
            # The scale is rounded to the precision of the weights, as in Gemma's training.
            x = x * torch.tensor(self.scale, dtype=x.dtype)
        if self.positions is not None:
            where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            x = x + self.positions(where)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(tokens) if types is None else types)
        if self.norm is not None:
            x = self.norm(x)
        dropped: Tensor = self.dropout(self.noise(x))
        return dropped


def embed(numbers: Tensor, weight: Tensor) -> Tensor:
    """Return weight[numbers], for a weight [rows, width].

    The backward pass sums the gradients of a row's uses in the same order every time.
    """
    if use_kernel(weight):
        from argosy.model.ops.kernels.embedding_kernel import Embed

        result: Tensor = Embed.apply(numbers, weight)
        return result
    return F.embedding(numbers, weight)

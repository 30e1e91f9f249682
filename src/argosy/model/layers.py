"""The blocks every decoder is made of: norm, attention, MLP.

The query, key and value projections are one matrix, laid out group by group: for each key/value head its query heads,
then its key, then its value. Cutting the rows into equal parts therefore never cuts a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelSpec
from argosy.model.positions import Context, apply_rope


def make_norm(spec: ModelSpec, width: int) -> nn.Module:
    if spec.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=spec.norm_eps)
    return nn.LayerNorm(width, eps=spec.norm_eps, bias=spec.norm_bias)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kv_heads, self.head_dim, self.dropout = spec.kv_heads, spec.head_dim, spec.dropout
        self.group = spec.heads // spec.kv_heads  # query heads that share a key/value head
        self.qkv = nn.Linear(spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.attention_bias)
        self.out = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.attention_bias)
        self.q_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        batch, seq, _ = x.shape
        groups = self.qkv(x).view(
            batch, seq, -1, self.group + 2, self.head_dim
        )  # [batch, seq, kv_heads, group + 2, head_dim]
        q, k, v = groups.split((self.group, 1, 1), dim=3)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))  # [batch, heads, seq, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rope is not None:
            q, k = apply_rope(q, context.rope), apply_rope(k, context.rope)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.bias,
            is_causal=context.bias is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.group > 1,
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            y = F.silu(self.gate(x)) * self.up(x)
        elif self.activation == "relu":
            y = F.relu(self.up(x))
        else:
            y = F.gelu(self.up(x), approximate="tanh" if self.activation == "gelu_tanh" else "none")
        out: Tensor = self.down(y)
        return out


class Block(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attn_norm = make_norm(spec, spec.hidden)
        self.attn = Attention(spec)
        self.mlp_norm = make_norm(spec, spec.hidden)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self._drop(self.attn(self.attn_norm(x), context))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Embedding(nn.Module):
    """Token vectors, plus learned position vectors where the model has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden)
        self.positions = nn.Embedding(spec.max_seq_len, spec.hidden) if spec.positions == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.dropout(x, self.dropout, self.training)

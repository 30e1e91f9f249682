"""What `shipped.py` times beside Argosy: the loops that people write themselves, on one GPU, in the precision that Argosy trains in.

    python benchmarks/peers.py LOOP WORK [--micro-batch N] [--steps 40] [--precision auto]

`plain` is a decoder in plain PyTorch, of the size and kind of the preset (learned positions, LayerNorm and GELU, or rotary positions,
RMSNorm, SwiGLU and grouped keys), with torch's own attention, `torch.compile` of the whole model, autocast over 32-bit weights, fused AdamW
and gradient clipping. `transformers` is the same loop around the library's model, not compiled. Autocast is to bf16 where Argosy trains in bf16
or fp8, to fp16 with a loss scale where it trains in fp16, and off where it trains in fp32: on a CPU, unless `--precision` says otherwise.
Each prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from shipped import WORKS, Work
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve
from argosy.parallel.precision import DTYPES, choose_precision


def spec_of(work: Work) -> ModelSpec:
    keys = [
        "data.train=synthetic",
        f"data.seq_len={work.seq_len}",
        f"train.global_batch={work.batch}",
        "train.steps=1",
        "optim.lr=1e-4",
    ]
    return resolve(None, [f"model.preset={work.preset}", *keys, *work.keys]).spec.model


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, rotation: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = spec.heads, spec.kv_heads, spec.hidden // spec.heads
        bias = rotation is None
        self.qkv = nn.Linear(spec.hidden, (self.heads + 2 * self.kv_heads) * self.size, bias=bias)
        self.out = nn.Linear(spec.hidden, spec.hidden, bias=bias)
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rotation is not None:
            q, k = (_rotated(part, *self.rotation) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Linear(spec.hidden, 2 * spec.ffn if gated else spec.ffn, bias=not gated)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(F.gelu(x, approximate="tanh"))
        gate, value = x.chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, rotation: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        norm = nn.LayerNorm if rotation is None else nn.RMSNorm
        self.before, self.after = norm(spec.hidden), norm(spec.hidden)
        self.attention, self.mlp = Attention(spec, rotation), MLP(spec, gated=rotation is not None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Plain(nn.Module):
    """A decoder as a short training script has it. The vocabulary is padded to a multiple of 64, as such scripts do."""

    def __init__(self, spec: ModelSpec, seq_len: int, device: torch.device) -> None:
        super().__init__()
        learned = spec.positions == "learned"
        rows = -(-spec.vocab_size // 64) * 64
        self.tokens = nn.Embedding(rows, spec.hidden)
        self.places = nn.Embedding(seq_len, spec.hidden) if learned else None
        rotation = None
        if not learned:
            half = spec.hidden // spec.heads // 2
            turns = torch.arange(seq_len)[:, None] / 500_000.0 ** (torch.arange(half) / half)
            angles = torch.cat([turns, turns], -1).to(device)
            rotation = angles.cos(), angles.sin()
        self.blocks = nn.ModuleList(Block(spec, rotation) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.hidden) if learned else nn.RMSNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, rows, bias=False)
        if spec.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def plain(work: Work, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    model = Plain(spec_of(work), work.seq_len, device).to(device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return torch.compile(model) if device.type == "cuda" else model


def transformers(work: Work, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from argosy.families.hf_config import to_config

    config = AutoConfig.for_model(**to_config(spec_of(work)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().to(device).train()
    loss: Any = lambda tokens, labels: F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), labels.flatten())  # noqa: E731
    loss.parameters = model.parameters
    return loss  # type: ignore[no-any-return]


LOOPS = {"plain": plain, "transformers": transformers}


def time_steps(loop: str, work: Work, micro_batch: int, steps: int, precision: str = "auto") -> dict[str, Any]:
    """Train on random tokens. Returns the median time of the second half of the steps, and the peak of memory.

    Args:
        precision: a value of `train.precision`. The loop computes in the 16-bit type that Argosy would use for it here, or in fp32.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[choose_precision(precision, device)]
    mixed = dtype != torch.float32
    torch.manual_seed(0)
    # Argosy's fp32 matmuls are not rounded to TF32 either.
    torch.set_float32_matmul_precision("high" if mixed else "highest")
    loss_of = LOOPS[loop](work, device)
    parameters = list(loss_of.parameters())  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    vocabulary = spec_of(work).vocab_size
    seconds = []
    for _ in range(steps):
        batch = torch.randint(0, vocabulary, (work.batch, work.seq_len + 1))
        batch = batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch
        _settle(device)
        began = time.perf_counter()
        for part in batch.split(micro_batch):
            with torch.autocast(device.type, dtype if mixed else None, enabled=mixed):
                loss = loss_of(part[:, :-1], part[:, 1:])
            scaler.scale(loss * len(part) / work.batch).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        _settle(device)
        seconds.append(time.perf_counter() - began)
    return {
        "step_s": statistics.median(seconds[steps // 2 :]),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "micro_batch": micro_batch,
        "precision": {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precision", choices=["auto", *DTYPES], default="auto", help="train.precision of Argosy")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: at least 2, because the first step compiles the model and is not reported")
    work = WORKS[options.work]
    found = time_steps(options.loop, work, options.micro_batch or work.batch, options.steps, options.precision)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Mixture of experts: a router sends each token to its k best experts, and no token is ever dropped.

The expert matrices are stacked, [experts, out, in]. A grouped GEMM multiplies them with rows sorted by expert. An expert's
weight in a token's sum is applied before the expert's last matmul, which is linear. The rows that come out are therefore
only added up, and the backward pass does not need them.

Load balancing has two means. The balance loss is Switch's: experts x sum over experts of (share of the pairs sent to it x
mean score), which is 1 when loads are level and at most `experts`. The balance loss and the router's z-loss are means over
the tokens of a micro-batch. They enter the gradient at the router's weights, so that activation checkpointing (recompute)
cannot count them twice. The bias of DeepSeek-V3 is added to the scores only for choosing experts. After each step
`balance_experts` moves it by a fixed rate: up for experts below the mean load, down for experts above it. The loads are
outputs of the forward pass and are summed like the loss; the model stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from argosy.compat import add_each_, mm_float32, passed_on
from argosy.config.model import ModelSpec, MoESpec
from argosy.families.architecture import LayerPlan
from argosy.model.layers import MLP, AttentionBlock, normed
from argosy.model.ops.activation import activate, gated
from argosy.model.ops.grouped import grouped_linear
from argosy.model.ops.norm import add
from argosy.model.ops.permute import combine, dispatch, sort_by_expert, sort_weights
from argosy.model.positions import Context
from argosy.model.sharding import INSIDE, REPLICATED, Declaration, Sharding, shardable


class Routing(NamedTuple):
    # The weights in the sum over a token's experts, 32-bit.
    weights: Tensor  # [tokens, k]
    # The expert numbers.
    chosen: Tensor  # [tokens, k]
    # Logits and scores are 32-bit.
    logits: Tensor  # [tokens, experts]
    scores: Tensor  # [tokens, experts]


class Report(NamedTuple):
    """The routing statistics of one layer and one micro-batch, without gradients."""

    # The number of rows of each expert.
    load: Tensor  # [experts]
    # The balance loss, unweighted.
    balance: Tensor
    # The mean of log(sum of exp(logits))^2.
    z: Tensor


class Router(nn.Module):
    """The router. It computes scores in 32-bit floats, whatever the precision of the model."""

    tensor_parallel: ClassVar[Declaration] = {"weight": INSIDE, "bias": REPLICATED}

    def __init__(self, hidden: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, hidden))
        with_bias = spec.bias_rate is not None
        self.bias = (
            nn.Parameter(torch.empty(spec.experts, dtype=torch.float32), requires_grad=False) if with_bias else None
        )

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens x [tokens, hidden]."""
        spec = self.spec
        logits: Tensor = _RouterProduct.apply(x, self.weight)
        scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        weights: Tensor = _Pick.apply(scores, chosen)
        if spec.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights * spec.routed_scale, chosen, logits, scores)

    def _choose(self, scores: Tensor) -> Tensor:
        spec = self.spec
        if self.bias is not None:
            scores = scores + self.bias
        if spec.groups > 1:
            # Keep only the groups whose two best experts have the highest sum.
            by_group = scores.unflatten(-1, (spec.groups, -1))
            best = by_group.topk(2).values.sum(-1).topk(spec.top_groups).indices
            outside = ~_one_of(best, spec.groups).any(1)
            scores = by_group.masked_fill(outside[..., None], -torch.inf).flatten(1)
        return scores.topk(spec.top_k).indices


class Experts(nn.Module):
    """The routed experts: rows sorted by expert in, rows out. Expert parallelism shards only this module."""

    tensor_parallel: ClassVar[Declaration] = {"gate": Sharding(dim=1), "up": Sharding(dim=1), "down": Sharding(dim=2)}
    expert_parallel: ClassVar[Declaration] = dict.fromkeys(("gate", "up", "down"), Sharding(dim=0))
    gate, up, down = shardable("gate"), shardable("up"), shardable("down")

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.activation = spec.activation
        inner, outer = (moe.experts, moe.ffn, spec.hidden), (moe.experts, spec.hidden, moe.ffn)
        self.gate = nn.Parameter(torch.empty(inner)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(outer))

    def forward(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Return weights x expert(rows).

        Args:
            rows: [rows, hidden], sorted by expert.
            weights: [rows].
            offsets: [experts], where each expert's rows end.
        """
        up = grouped_linear(rows, self.up, offsets)
        if self.gate is None:
            y = (activate(self.activation, up, None) * weights[:, None]).to(up.dtype)
        else:
            y = gated(self.activation, grouped_linear(rows, self.gate, offsets), up, weights)
        return grouped_linear(y, self.down, offsets)


class MoE(nn.Module):
    """A mixture of experts in place of an MLP: the sum of a token's routed experts and of the shared experts."""

    tensor_parallel: ClassVar[Declaration] = {"shared_gate": INSIDE}

    # `argosy.parallel` sets these two if a micro-batch is spread over ranks: the share of its tokens on this rank, and the
    # function that sums loads over the shares. The report is then this rank's part of a sum.
    share = 1.0
    sum_shares: Callable[[Tensor], Tensor] = staticmethod(lambda load: load)
    # Also set by `argosy.parallel`: the routed experts are on other ranks, and take a function to compute while rows travel to them.
    experts_elsewhere = False

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.spec = moe
        self.router = Router(spec.hidden, moe)
        self.experts = Experts(spec, moe)
        self.shared = MLP(spec, moe.shared_experts * moe.ffn) if moe.shared_experts else None
        self.shared_gate = nn.Linear(spec.hidden, 1, bias=False) if moe.shared_gate else None

    def forward(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Report]:
        """Return the output for x [batch, seq, hidden] and the routing report.

        Args:
            scale: the weight in the loss of a mean over x's tokens, or None without a loss.
        """
        flat = x.flatten(0, -2)
        routing = self.router(flat)
        permutation = sort_by_expert(routing.chosen, self.spec.experts)
        load = permutation.load
        balance, z = balance_loss(routing, self.sum_shares(load)) * self.share, z_loss(routing.logits) * self.share
        weights = routing.weights
        if scale is not None and (self.spec.balance_loss or self.spec.z_loss):
            weights = _AddLoss.apply(weights, self.spec.balance_loss * balance + self.spec.z_loss * z, scale)
        routed = dispatch(flat, permutation), sort_weights(weights, permutation), permutation.offsets
        report = Report(load, balance.detach(), z.detach())
        if self.shared is None:
            return combine(self.experts(*routed), permutation).view(x.shape), report
        # What is compiled stays one graph.
        if self.experts_elsewhere and not torch.compiler.is_compiling():
            rows, shared = self.experts(*routed, partial(self._shared_output, self.shared, x))
            return combine(rows, permutation).view(x.shape) + shared, report
        y = combine(self.experts(*routed), permutation).view(x.shape)
        return y + self._shared_output(self.shared, x), report

    def _shared_output(self, shared: MLP, x: Tensor) -> Tensor:
        """Return the output of the shared experts."""
        y: Tensor = shared(x)
        return y if self.shared_gate is None else self.shared_gate(x).sigmoid() * y


class SparseBlock(AttentionBlock):
    """A block with attention and experts, each added to the residual stream. It also returns the routing report."""

    def __init__(self, spec: ModelSpec, layer: LayerPlan, moe: MoESpec, row: int) -> None:
        super().__init__(spec, layer)
        # The number of this layer among the model's layers with experts: its row in the loads.
        self.row = row
        self.mlp = MoE(spec, moe)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Report]:
        x, h = self.attend(x, context)
        y, report = self.mlp(h, context.scale)
        return add(x, *self.drop(*normed(self.mlp_post_norm, y, None))), report


def balance_loss(routing: Routing, load: Tensor) -> Tensor:
    """Return the balance loss, which is 1 when all experts have equal loads.

    Sigmoid scores are first normalised to shares, which softmax scores already are.
    """
    shares = routing.scores / (routing.scores.sum(-1, keepdim=True) + 1e-20)
    return len(load) * (load / load.sum() * shares.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def sum_reports(reports: Mapping[int, Report], rows: int, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Sum the reports of a model's layers, keyed by their row in the loads.

    Returns:
        The metrics for the log, means over the `rows` layers weighted by tokens, and the loads [rows, experts]. A layer
        without a report adds nothing.
    """
    one = next(iter(reports.values()))
    means = {
        "balance_loss": torch.stack([report.balance for report in reports.values()]).sum() * (tokens / rows),
        "router_z": torch.stack([report.z for report in reports.values()]).sum() * (tokens / rows),
    }
    loads = [reports[row].load if row in reports else torch.zeros_like(one.load) for row in range(rows)]
    return means, torch.stack(loads)


def describe_load(load: Tensor) -> dict[str, float]:
    """Return the load balancing metrics for the log, from loads [layers, experts]. Waits for the device."""
    load = load.cpu()
    shares = load.double() / load.sum(-1, keepdim=True)
    entropy = -torch.xlogy(shares, shares).sum(-1)
    return {
        # The load of the busiest expert of any layer, relative to the mean load.
        "max_load": float(shares.max()) * load.shape[-1],
        # The number of experts when loads are level; a mean over layers.
        "effective_experts": float(entropy.exp().mean()),
        # Experts that got no rows, over all layers.
        "idle_experts": int((load == 0).sum()),
    }


@torch.no_grad()
def balance_experts(model: nn.Module, load: Tensor) -> None:
    """Move each expert's bias one step towards a level load, given the loads of a global batch [layers, experts].

    The bias of a frozen router, as beside adapters, stays as it is."""
    blocks = [module for module in model.modules() if isinstance(module, SparseBlock)]
    routers = {block.row: block.mlp.router for block in blocks if block.mlp.router.weight.requires_grad}
    biases = {row: router.bias for row, router in routers.items() if router.bias is not None}
    if biases:
        rate = blocks[0].mlp.spec.bias_rate or 0.0
        # experts x (mean - load), still whole numbers.
        below = load.sum(-1, keepdim=True) - load.shape[-1] * load
        moves = (rate * below.sign()).unbind()
        add_each_(list(biases.values()), [moves[row] for row in biases])


class _RouterProduct(torch.autograd.Function):
    """Computes x weight^T in 32-bit floats, without a 32-bit copy of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return mm_float32(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        d_logits = gradients[0].to(x.dtype)
        return d_logits @ weight.to(x.dtype), (d_logits.t() @ x).to(weight.dtype)


class _Pick(torch.autograd.Function):
    """Gathers scores[t, chosen[t, j]]. A token chooses an expert at most once, so the gradient needs no atomic sums."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.experts = scores.shape[1]
        return scores.gather(1, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (chosen,) = ctx.saved_tensors
        return (_one_of(chosen, ctx.experts) * gradients[0][..., None]).sum(1), None


class _AddLoss(torch.autograd.Function):
    """Returns x unchanged, and adds scale x loss to the loss that is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(loss.dtype))
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.saved_tensors[0], None


def _one_of(index: Tensor, count: int) -> Tensor:
    """Return the one-hot form of an index: [n, j] -> [n, j, count]."""
    return index[..., None] == torch.arange(count, device=index.device)

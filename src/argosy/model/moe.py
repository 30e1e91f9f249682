"""Mixture of experts: a router sends each token to its k best experts, and no token is ever dropped.

The expert matrices are stacked, [experts, out, in], and multiplied by a grouped product over rows sorted by expert. The
weight of an expert in a token's sum is multiplied in before its last product, which is linear: so the rows that come out
are only added up, and need not be kept for the backward pass.

Two things hold the experts' load level. The balance loss is experts x sum over experts of (share of the pairs sent to it x
mean score), Switch's form: 1 when level, at most `experts`. It and the router's z-loss are means over the tokens of a
micro-batch, and enter the gradient where the router's weights leave it, so that recomputing a block cannot count them twice.
The bias of DeepSeek-V3 is added to the scores only to choose by; after each step it moves by a fixed rate, up for experts
that got less than the mean and down for those that got more (`balance_experts`). The loads it needs are outputs of the
forward pass and are summed like the loss; nothing is remembered in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    weights: Tensor  # in the sum over a token's experts, 32-bit  # [tokens, k]
    chosen: Tensor  # experts  # [tokens, k]
    logits: Tensor  # 32-bit  # [tokens, experts]
    scores: Tensor  # 32-bit  # [tokens, experts]


class Report(NamedTuple):
    """What one layer did with one micro-batch; no gradients."""

    load: Tensor  # rows of each expert, whole numbers  # [experts]
    balance: Tensor  # the balance loss, unweighted
    z: Tensor  # the mean of log(sum of exp(logits))^2


class Router(nn.Module):
    """Scores in 32-bit floats, whatever the model computes in."""

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
        """For x [tokens, hidden]."""
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
        if spec.groups > 1:  # only the experts of the groups whose two best have the highest sum
            by_group = scores.unflatten(-1, (spec.groups, -1))
            best = by_group.topk(2).values.sum(-1).topk(spec.top_groups).indices
            outside = ~_one_of(best, spec.groups).any(1)
            scores = by_group.masked_fill(outside[..., None], -torch.inf).flatten(1)
        return scores.topk(spec.top_k).indices


class Experts(nn.Module):
    """The routed experts: rows sorted by expert in, rows out. It is all that expert parallelism has to spread."""

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
        """weights x expert(rows): rows [rows, hidden], weights [rows], offsets [experts] where each expert's rows end."""
        up = grouped_linear(rows, self.up, offsets)
        if self.gate is None:
            y = (activate(self.activation, up, None) * weights[:, None]).to(up.dtype)
        else:
            y = gated(self.activation, grouped_linear(rows, self.gate, offsets), up, weights)
        return grouped_linear(y, self.down, offsets)


class MoE(nn.Module):
    """In place of an MLP: the sum of the experts a token is routed to, and of those that are shared by all."""

    tensor_parallel: ClassVar[Declaration] = {"shared_gate": INSIDE}

    # Where a micro-batch is spread over ranks, set by `argosy.parallel`: the share of its tokens that is given here, and how
    # what is counted in the shares becomes the sum of them all. What is reported is then this share's part of a sum.
    share = 1.0
    sum_shares: Callable[[Tensor], Tensor] = staticmethod(lambda load: load)

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.spec = moe
        self.router = Router(spec.hidden, moe)
        self.experts = Experts(spec, moe)
        self.shared = MLP(spec, moe.shared_experts * moe.ffn) if moe.shared_experts else None
        self.shared_gate = nn.Linear(spec.hidden, 1, bias=False) if moe.shared_gate else None

    def forward(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Report]:
        """For x [batch, seq, hidden]; `scale` is what a mean over its tokens weighs in the loss, None without a loss."""
        flat = x.flatten(0, -2)
        routing = self.router(flat)
        permutation = sort_by_expert(routing.chosen, self.spec.experts)
        load = permutation.load
        balance, z = balance_loss(routing, self.sum_shares(load)) * self.share, z_loss(routing.logits) * self.share
        weights = routing.weights
        if scale is not None and (self.spec.balance_loss or self.spec.z_loss):
            weights = _AddLoss.apply(weights, self.spec.balance_loss * balance + self.spec.z_loss * z, scale)
        rows = self.experts(dispatch(flat, permutation), sort_weights(weights, permutation), permutation.offsets)
        y = combine(rows, permutation).view(x.shape)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
        return y, Report(load, balance.detach(), z.detach())


class SparseBlock(AttentionBlock):
    """Attention and experts, each added to the residual stream. It also returns what the experts report."""

    def __init__(self, spec: ModelSpec, layer: LayerPlan, moe: MoESpec, row: int) -> None:
        super().__init__(spec, layer)
        self.row = row  # of the loads: which of the model's layers with experts this is
        self.mlp = MoE(spec, moe)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Report]:
        x, h = self.attend(x, context)
        y, report = self.mlp(h, context.scale)
        return add(x, *self.drop(*normed(self.mlp_post_norm, y, None))), report


def balance_loss(routing: Routing, load: Tensor) -> Tensor:
    """1 when every expert gets as much; sigmoid scores are first made shares, as softmax scores are."""
    shares = routing.scores / (routing.scores.sum(-1, keepdim=True) + 1e-20)
    return len(load) * (load / load.sum() * shares.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def sum_reports(reports: Mapping[int, Report], rows: int, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(for the record: means over layers, weighted by tokens; the load of every layer's experts [layers, experts]), given the
    reports by row of the loads. A layer that is not among the `rows` adds nothing."""
    one = next(iter(reports.values()))
    means = {
        "balance_loss": torch.stack([report.balance for report in reports.values()]).sum() * (tokens / rows),
        "router_z": torch.stack([report.z for report in reports.values()]).sum() * (tokens / rows),
    }
    loads = [reports[row].load if row in reports else torch.zeros_like(one.load) for row in range(rows)]
    return means, torch.stack(loads)


def describe_load(load: Tensor) -> dict[str, float]:
    """For the record, of loads [layers, experts]; waits for the device."""
    load = load.cpu()
    shares = load.double() / load.sum(-1, keepdim=True)
    entropy = -torch.xlogy(shares, shares).sum(-1)
    return {
        "max_load": float(shares.max()) * load.shape[-1],  # of the busiest expert of any layer; 1 is the mean
        "effective_experts": float(entropy.exp().mean()),  # all of them when level; a mean over layers
        "idle_experts": int((load == 0).sum()),  # that got nothing, in all layers
    }


@torch.no_grad()
def balance_experts(model: nn.Module, load: Tensor) -> None:
    """Move each expert's bias by one step towards a level load, given the load of a whole global batch [layers, experts]."""
    blocks = [module for module in model.modules() if isinstance(module, SparseBlock)]
    biases = {block.row: block.mlp.router.bias for block in blocks if block.mlp.router.bias is not None}
    if biases:
        rate = blocks[0].mlp.spec.bias_rate or 0.0
        below = load.sum(-1, keepdim=True) - load.shape[-1] * load  # experts x (mean - load), still whole numbers
        moves = (rate * below.sign()).unbind()
        add_each_(list(biases.values()), [moves[row] for row in biases])


class _RouterProduct(torch.autograd.Function):
    """x weight^T in 32-bit floats, without a 32-bit copy of x."""

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
    """scores[t, chosen[t, j]]. An expert is chosen at most once a token, so the gradient needs no sum over threads."""

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
    """x, with scale x loss added to whatever is differentiated behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(loss.dtype))
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.saved_tensors[0], None


def _one_of(index: Tensor, count: int) -> Tensor:
    """[n, j] -> [n, j, count], true where the last index is the one given."""
    return index[..., None] == torch.arange(count, device=index.device)

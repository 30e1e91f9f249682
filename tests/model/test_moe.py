"""Routing loses no token, products of groups equal products one by one, and the auxiliary losses are what is written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from argosy.config.resolve import resolve_model
from argosy.data.samples.masks import IGNORED
from argosy.errors import ArgosyError
from argosy.model.adapters import freeze_base
from argosy.model.build import build_model, initialise
from argosy.model.decoder import Decoder
from argosy.model.moe import MoE, balance_experts
from argosy.model.objective import Loss, Objective
from argosy.model.ops import cross_entropy, grouped
from argosy.model.ops.grouped import grouped_linear
from argosy.model.ops.matmul import separable, weights_later
from argosy.model.ops.permute import combine, dispatch, sort_by_expert, sort_weights
from argosy.parallel.precision import apply_precision

SIZES = ["layers=2", "hidden=16", "heads=2", "kv_heads=2", "vocab_size=64", "max_seq_len=16", "ffn=24"]


def decoder(*changes: str, preset: str = "mixtral-8x7b") -> Decoder:
    spec = resolve_model(preset, [*SIZES, "moe.experts=4", "moe.top_k=2", "moe.ffn=24", *changes])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(20)  # so that the choices are clear ones
    return model


def layer(*changes: str) -> MoE:
    found = decoder(*changes).layers["0"].mlp
    assert isinstance(found, MoE)
    return found


def choices(tokens: int, k: int, experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(k).indices


SHAPES = {
    "tokens": st.integers(1, 40), "experts": st.integers(1, 9), "k": st.integers(1, 9), "seed": st.integers(0, 99),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_every_token_reaches_each_of_its_experts_and_comes_back(tokens: int, experts: int, k: int, seed: int) -> None:
    k = min(k, experts)
    chosen = choices(tokens, k, experts, seed)
    x = torch.arange(float(tokens))[:, None].expand(tokens, 3).contiguous()
    permutation = sort_by_expert(chosen, experts)
    assert int(permutation.offsets[-1]) == tokens * k
    rows = dispatch(x, permutation)
    first = 0
    for expert, end in enumerate(permutation.offsets.tolist()):
        wanted = [t for t in range(tokens) if expert in chosen[t]]
        assert rows[first:end, 0].tolist() == wanted  # all of them, once, in order
        assert int(permutation.load[expert]) == len(wanted)
        first = end
    assert torch.equal(combine(rows, permutation), k * x)
    weights = torch.rand(tokens, k)
    weighed = combine(rows * sort_weights(weights, permutation)[:, None], permutation)
    torch.testing.assert_close(weighed, x * weights.sum(1, keepdim=True))


@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_gradients_through_the_permutation_are_those_of_plain_indexing(
    tokens: int, experts: int, k: int, seed: int
) -> None:
    k = min(k, experts)
    permutation = sort_by_expert(choices(tokens, k, experts, seed), experts)
    factors = torch.randn(tokens * k, 2, dtype=torch.float64)
    found, expected = [], []
    for results, plain in ((found, False), (expected, True)):
        x = torch.linspace(-1, 1, tokens * 2, dtype=torch.float64).view(tokens, 2).requires_grad_(True)
        weights = torch.linspace(0.1, 2, tokens * k, dtype=torch.float64).view(tokens, k).requires_grad_(True)
        if plain:
            y = x[permutation.order // k] * weights.flatten()[permutation.order, None] * factors
            y = y[permutation.rows.flatten()].view(tokens, k, 2).sum(1)
        else:
            y = dispatch(x, permutation) * sort_weights(weights, permutation)[:, None] * factors
            y = combine(y, permutation)
        (y * y).sum().backward()
        results += [y.detach(), x.grad, weights.grad]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@settings(max_examples=40, deadline=None)
@given(loads=st.lists(st.integers(0, 7), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_product_of_groups_is_a_product_for_each(loads: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(sum(loads), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(loads), 3, 5, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor(loads).cumsum(0).to(torch.int32)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, offsets), (x, weight))
    parts = [part @ w.t() for part, w in zip(x.split(loads), weight, strict=True)]
    torch.testing.assert_close(grouped_linear(x, weight, offsets), torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_product_equals_the_loop(dtype: torch.dtype) -> None:
    """The one a GPU uses; torch has it on the CPU too."""
    from argosy.compat import grouped_mm
    from argosy.model.ops.grouped import outer_loop, product_loop

    torch.manual_seed(0)
    a, b, weight = torch.randn(20, 16, dtype=dtype), torch.randn(20, 8, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype)
    offsets = torch.tensor([3, 3, 16, 20], dtype=torch.int32)
    tight = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    product = grouped_mm(a, weight.transpose(1, 2), offsets)
    torch.testing.assert_close(product, product_loop(a, weight.transpose(1, 2), offsets), **tight)
    torch.testing.assert_close(grouped_mm(b.t(), a, offsets), outer_loop(b, a, offsets), **tight)


VARIANTS = {
    "mixtral": [],
    "top-1": ["moe.top_k=1", "moe.norm_topk=false"],
    "all experts": ["moe.top_k=4"],
    "sigmoid, scaled": ["moe.router=sigmoid", "moe.routed_scale=2.5", "moe.bias_rate=0.01"],
    "shared": ["moe.shared_experts=2"],
    "shared, gated": ["moe.shared_experts=1", "moe.shared_gate=true"],
    "no gate": ["activation=gelu"],
    "groups": ["moe.groups=2", "moe.top_groups=1"],
}


def reference(moe: MoE, x: Tensor) -> Tensor:
    """Every token by itself, expert by expert."""
    spec, experts = moe.spec, moe.experts

    def mlp(gate: Tensor | None, up: Tensor, down: Tensor, token: Tensor) -> Tensor:
        inner = F.gelu(up @ token) if gate is None else F.silu(gate @ token) * (up @ token)
        return down @ inner

    outs = []
    for token in x.flatten(0, 1):
        logits = moe.router.weight @ token
        scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
        choice = scores if moe.router.bias is None else scores + moe.router.bias
        allowed = range(spec.experts)
        if spec.groups > 1:
            size = spec.experts // spec.groups
            sums = [float(choice[g * size : (g + 1) * size].topk(2).values.sum()) for g in range(spec.groups)]
            best = sorted(range(spec.groups), key=lambda g: -sums[g])[: spec.top_groups]
            allowed = [e for e in allowed if e // size in best]
        chosen = sorted(allowed, key=lambda e: -float(choice[e]))[: spec.top_k]
        total = sum(scores[e] for e in chosen) if spec.norm_topk else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            gate = None if experts.gate is None else experts.gate[e]
            out = out + spec.routed_scale * scores[e] / total * mlp(gate, experts.up[e], experts.down[e], token)
        if moe.shared is not None:
            gate = None if moe.shared.gate is None else moe.shared.gate.weight
            shared = mlp(gate, moe.shared.up.weight, moe.shared.down.weight, token)
            out = out + (shared if moe.shared_gate is None else moe.shared_gate(token).sigmoid() * shared)
        outs.append(out)
    return torch.stack(outs).view(x.shape)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_layer_is_the_sum_over_each_tokens_experts(changes: list[str]) -> None:
    moe = layer(*changes).double()
    if moe.router.bias is not None:
        with torch.no_grad():
            moe.router.bias.copy_(torch.tensor([0.3, -0.2, 0.1, -0.4]))
    results = []
    for forward in (lambda x: moe(x, None)[0], lambda x: reference(moe, x)):
        torch.manual_seed(0)
        x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
        moe.zero_grad()
        y = forward(x)
        (y * torch.randn_like(y)).sum().backward()
        results.append([y, x.grad, *(p.grad for p in moe.parameters() if p.requires_grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the router works in 32 bits


def test_an_expert_without_a_token_has_a_zero_gradient_and_nothing_is_nan() -> None:
    moe = layer()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:2, 0] = torch.tensor([5.0, 4.0])
    x = torch.rand(1, 9, 16) + 0.1
    y, report = moe(x, torch.tensor(1.0))
    assert report.load.tolist() == [9, 9, 0, 0]
    y.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in moe.parameters() if p.grad is not None)
    assert bool((moe.experts.up.grad[2:] == 0).all())  # type: ignore[index]
    assert bool((moe.experts.up.grad[:2] != 0).any())  # type: ignore[index]


def written_out(moe: MoE, x: Tensor) -> Tensor:
    """The auxiliary losses as formulas, a mean over tokens."""
    logits = x.flatten(0, 1) @ moe.router.weight.t()
    scores = logits.softmax(-1) if moe.spec.router == "softmax" else logits.sigmoid()
    chosen = F.one_hot(scores.topk(moe.spec.top_k).indices, moe.spec.experts).sum(1).float()
    sent = chosen.sum(0) / chosen.sum()
    meant = (scores / scores.sum(-1, keepdim=True)).mean(0)
    balance = moe.spec.experts * (sent * meant).sum()
    return moe.spec.balance_loss * balance + moe.spec.z_loss * logits.exp().sum(-1).log().pow(2).mean()


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_auxiliary_gradient_is_that_of_the_formula(router: str) -> None:
    moe = layer(f"moe.router={router}", "moe.balance_loss=0.3", "moe.z_loss=0.05")
    x, results = torch.randn(2, 8, 16), []
    for scale in (torch.tensor(7.0), None):
        inputs = x.clone().requires_grad_(True)
        moe.zero_grad()
        loss = moe(inputs, scale)[0].square().sum()
        if scale is None:
            loss = loss + 7.0 * written_out(moe, inputs)
        loss.backward()
        results.append((inputs.grad, moe.router.weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_level_load_has_balance_loss_one_and_one_expert_for_all_has_the_most() -> None:
    moe = layer("moe.top_k=1")
    moe.router.weight.data.zero_()
    moe.router.weight.data[:, :4] = 50 * torch.eye(4)
    level, same = torch.zeros(1, 8, 16), torch.zeros(1, 8, 16)
    level[0, range(8), [0, 1, 2, 3] * 2] = 1
    same[..., 2] = 1
    assert float(moe(level, None)[1].balance) == pytest.approx(1.0)
    assert float(moe(same, None)[1].balance) == pytest.approx(4.0)


def run(model: Decoder, tokens: Tensor, labels: Tensor, scale: float = 1.0) -> tuple[Loss, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(tokens, labels, Objective(scale=scale))
    loss.total.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_auxiliary_loss_is_weighed_by_the_labels_that_count_and_scaled_with_the_loss() -> None:
    model = decoder("moe.balance_loss=0.5", "moe.z_loss=0.1")
    tokens, labels = torch.randint(0, 64, (2, 2, 12))
    labels[0, 3:] = IGNORED
    scaled, plain = run(model, tokens, labels, 1024.0)[1], run(model, tokens, labels)[1]
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], 1024.0 * gradient)
    none = torch.full_like(labels, IGNORED)
    assert all(bool((gradient == 0).all()) for gradient in run(model, tokens, none)[1].values())


def test_without_auxiliary_losses_the_cut_into_micro_batches_does_not_matter() -> None:
    """Tokens are routed one by one, so loads and gradients add up; the balance loss is of a micro-batch, and does not."""
    tokens, labels = torch.randint(0, 64, (2, 4, 12))
    for changes, independent in ((["moe.balance_loss=0", "moe.z_loss=0.1"], True), (["moe.balance_loss=0.5"], False)):
        model = decoder(*changes)
        whole, gradients = run(model, tokens, labels)
        parts = [run(model, t[None], y[None]) for t, y in zip(tokens, labels, strict=True)]
        assert torch.equal(sum(part.expert_load for part, _ in parts), whole.expert_load)  # type: ignore[arg-type]
        total = torch.stack([part["layers.0.mlp.router.weight"] for _, part in parts]).sum(0)
        same = torch.allclose(total, gradients["layers.0.mlp.router.weight"], rtol=1e-4, atol=1e-5)
        assert same is independent
        assert float(sum(part.metrics["router_z"] for part, _ in parts)) == pytest.approx(
            float(whole.metrics["router_z"]), rel=1e-5
        )


def test_recomputing_a_block_counts_nothing_twice() -> None:
    model = decoder("moe.balance_loss=0.5", "moe.z_loss=0.1")
    tokens, labels = torch.randint(0, 64, (2, 2, 12))
    loss, plain = run(model, tokens, labels)
    for block in model.layers.values():
        block.forward = _recomputed(block.forward)
    again, found = run(model, tokens, labels)
    assert torch.equal(again.expert_load, loss.expert_load)  # type: ignore[arg-type]
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def _recomputed(forward: Any) -> Any:
    return lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)


def test_the_bias_moves_towards_a_level_load_and_only_chooses() -> None:
    model = decoder("moe.router=sigmoid", "moe.bias_rate=0.25", "moe.balance_loss=0")
    tokens = torch.randint(0, 64, (4, 12))
    before = model(tokens)
    load = torch.tensor([[30, 20, 24, 22], [24, 24, 24, 24]])
    balance_experts(model, load)
    biases = [model.layers[i].mlp.router.bias for i in "01"]
    assert [bias.tolist() for bias in biases] == [[-0.25, 0.25, 0.0, 0.25], [0.0] * 4]
    biases[0].fill_(0.7)  # the same for all: the choice and the weights stay
    assert torch.equal(model(tokens), before)
    biases[0].copy_(torch.tensor([100.0, 100.0, 0.0, 0.0]))
    found = model(tokens, tokens, Objective()).expert_load
    assert found is not None
    assert found[0].tolist() == [48, 48, 0, 0]


def test_the_bias_of_a_frozen_router_stays() -> None:
    model = decoder("moe.router=sigmoid", "moe.bias_rate=0.25", "moe.balance_loss=0", "lora.rank=2")
    freeze_base(model)
    balance_experts(model, torch.tensor([[30, 20, 24, 22], [24, 24, 24, 24]]))
    assert not any(model.layers[i].mlp.router.bias.any() for i in "01")


def test_levelled_by_its_bias_a_lopsided_router_becomes_level() -> None:
    torch.manual_seed(4)
    model = decoder("layers=1", "moe.router=sigmoid", "moe.bias_rate=0.02", "moe.balance_loss=0")
    with torch.no_grad():
        model.embed.tokens.weight.add_(0.02)  # what all tokens have in common leads to the same experts
    tokens = torch.randint(0, 64, (32, 16))
    loads = []
    for _ in range(60):
        load = model(tokens, tokens, Objective()).expert_load
        assert load is not None
        balance_experts(model, load)
        loads.append(int(load.max()) / int(load.sum()))
    assert loads[0] > 0.4
    assert loads[-1] < 0.29  # a quarter is level


def test_dense_layers_come_first() -> None:
    model = decoder("moe.dense_layers=1")
    assert not isinstance(model.layers["0"].mlp, MoE)
    assert isinstance(model.layers["1"].mlp, MoE)
    tokens = torch.randint(0, 64, (1, 5))
    load = model(tokens, tokens, Objective()).expert_load
    assert load is not None
    assert load.shape == (1, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["moe.top_k=5"], "top_k 5 is more than experts 4"),
        (["moe.groups=3"], "do not make 3 equal groups"),
        (["moe.groups=2", "moe.top_groups=3"], "top_groups 3 is more than groups 2"),
        (["moe.groups=2", "moe.top_k=3"], "more than the 2 experts"),
        (["moe.shared_gate=true"], "shared_experts is 0"),
        (["moe.dense_layers=2"], "leaves none of 2 layers"),
        (["mlp_bias=true"], "no biases"),
        (["moe.bias_rate=-1"], "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(changes: list[str], words: str) -> None:
    with pytest.raises(ArgosyError, match=words):
        decoder(*changes)


def test_a_traced_model_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # As models are before they are compiled.
    monkeypatch.setattr(cross_entropy, "_apply", cross_entropy._apply)
    cross_entropy.hide_from_compiler()
    model = decoder("moe.balance_loss=0.5", "moe.z_loss=0.1")
    tokens, labels = torch.randint(0, 64, (2, 2, 12))
    loss, plain = run(model, tokens, labels)
    model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
    again, found = run(model, tokens, labels)
    assert torch.equal(again.expert_load, loss.expert_load)  # type: ignore[arg-type]
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [["moe.groups=2", "moe.top_groups=1"], ["moe.shared_experts=1", "activation=gelu"]])
def test_no_shape_depends_on_the_data_and_the_host_never_reads_it(
    changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors that have shapes but no data, reading a value is an error; so is a stride the grouped kernel refuses."""
    monkeypatch.setattr(grouped, "_has_kernel", lambda a, b: True)
    sparse = ["moe.experts=4", "moe.ffn=24", "moe.bias_rate=0.1", "moe.z_loss=0.1"]
    with FakeTensorMode():
        model = build_model(resolve_model("mixtral-8x7b", [*SIZES, *sparse, *changes]))
        apply_precision(model, "bf16")
        tokens = torch.zeros(2, 9, dtype=torch.long)
        loss = model(tokens, tokens, Objective())
        loss.total.backward()
        balance_experts(model, loss.expert_load)
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad or parameter.grad is not None, name


def test_the_loop_over_experts_does_read_them() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        grouped._groups(torch.zeros(4, dtype=torch.int32))


def test_deferred_gradients_of_experts_are_those_of_a_plain_backward_pass() -> None:
    """The operators of the loop over experts have results, not steps, that autograd sees."""
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    (expected,) = torch.autograd.grad(grouped_linear(x, weight, offsets).square().sum(), weight)
    with separable():
        y = grouped_linear(x * 1, weight, offsets)
    with weights_later() as later:
        y.square().sum().backward()
    assert weight.grad is None
    later.run()
    torch.testing.assert_close(weight.grad, expected)

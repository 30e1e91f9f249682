"""Mixtures of experts compute what transformers computes, logits and gradients, from the files it writes, and it loads ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.checkpoint.hf.hf_convert import entries, from_hf, to_hf
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.families.hf_config import from_config
from argosy.model.build import build_model
from argosy.model.decoder import Decoder
from argosy.model.objective import Objective

T = transformers
SMALL = ["hidden=48", "vocab_size=101", "max_seq_len=40", "heads=6", "kv_heads=2", "head_dim=8", "ffn=80"]
SIZES: dict[str, Any] = {
    "hidden_size": 48, "vocab_size": 101, "max_position_embeddings": 40, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3,
}  # fmt: skip


def rope(theta: float, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def deepseek(**more: Any) -> Any:
    """GLM-4's class has DeepSeek-V3's router, bias and shared experts around plain attention."""
    config = T.Glm4MoeConfig(
        **SIZES, intermediate_size=80, moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=3, first_k_dense_replace=1, routed_scaling_factor=2.5, rms_norm_eps=1e-6,
        **rope(10_000.0, partial_rotary_factor=1.0), **more,
    )  # fmt: skip
    return T.Glm4MoeForCausalLM(config)


DEEPSEEK = [
    "layers=3", "moe={experts: 8, top_k: 3, ffn: 24, shared_experts: 2, dense_layers: 1, router: sigmoid, norm_topk: true, "
    "routed_scale: 2.5, bias_rate: 0.001}",
]  # fmt: skip
CASES: dict[str, tuple[str, list[str], Any]] = {
    "mixtral": (
        "mixtral-8x7b",
        ["layers=3", "moe.experts=5", "moe.ffn=24"],
        lambda: T.MixtralForCausalLM(
            T.MixtralConfig(
                **SIZES, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2, **rope(1_000_000.0)
            )
        ),
    ),
    "qwen3-moe": (
        "qwen3-30b-a3b",
        ["layers=3", "moe.experts=6", "moe.top_k=3", "moe.ffn=24"],
        lambda: T.Qwen3MoeForCausalLM(
            T.Qwen3MoeConfig(
                **SIZES,
                intermediate_size=80,
                moe_intermediate_size=24,
                num_experts=6,
                num_experts_per_tok=3,
                norm_topk_prob=True,
                **rope(1_000_000.0),
            )
        ),
    ),
    "qwen3-moe-unnormalised": (
        "qwen3-30b-a3b",
        ["layers=3", "moe.experts=6", "moe.top_k=3", "moe.ffn=24", "moe.norm_topk=false"],
        lambda: T.Qwen3MoeForCausalLM(
            T.Qwen3MoeConfig(
                **SIZES,
                intermediate_size=80,
                moe_intermediate_size=24,
                num_experts=6,
                num_experts_per_tok=3,
                norm_topk_prob=False,
                **rope(1_000_000.0),
            )
        ),
    ),
    "deepseek-v3-router": ("deepseek-moe-16b", DEEPSEEK, deepseek),
    "deepseek-v3-groups": (
        "deepseek-moe-16b",
        [*DEEPSEEK, "moe.groups=4", "moe.top_groups=2"],
        lambda: deepseek(n_group=4, topk_group=2),
    ),
}


class Pair(NamedTuple):
    spec: ModelSpec
    ours: Decoder
    theirs: Any
    files: Path  # what their save_pretrained wrote


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """With the same random weights, biases included, taken from their files."""
    preset, changes, make = CASES[request.param]
    spec = resolve_model(preset, SMALL + changes)
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    ours = build_model(spec)
    ours.load_state_dict(from_hf(entries(spec), load_file(tmp_path / "model.safetensors")))
    return Pair(spec, ours.eval(), theirs, tmp_path)


def test_logits_and_loss_are_equal(pair: Pair) -> None:
    tokens = torch.randint(0, 101, (2, 33))
    expected = pair.theirs(input_ids=tokens).logits
    torch.testing.assert_close(pair.ours(tokens), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    loss = pair.ours(tokens[:, :-1], tokens[:, 1:], Objective()).cross_entropy / tokens[:, 1:].numel()
    assert float(loss) == pytest.approx(float(pair.theirs(input_ids=tokens, labels=tokens).loss), rel=1e-5)


def test_gradients_are_equal(pair: Pair, tmp_path: Path) -> None:
    """Of the logits' loss: the model's own auxiliary losses do not reach it."""
    tokens, labels = torch.randint(0, 101, (2, 2, 33))
    for model in (pair.ours, pair.theirs):
        out = model(tokens)
        logits = out if isinstance(out, Tensor) else out.logits
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = gradients_by_our_names(pair, tmp_path / "gradients")
    for name, parameter in pair.ours.named_parameters():
        if parameter.requires_grad:
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_balance_loss_is_theirs_for_each_expert_of_a_token(pair: Pair) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe = pair.spec.moe
    assert moe is not None
    layer = pair.ours.layers[str(pair.spec.layers - 1)].mlp
    x = torch.randn(2, 17, pair.spec.hidden)
    if moe.router == "softmax":
        logits = x.flatten(0, 1) @ layer.router.weight.t()
        theirs = load_balancing_loss_func((logits,), moe.experts, moe.top_k)
        assert float(layer(x, None)[1].balance) == pytest.approx(float(theirs) / moe.top_k, rel=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_training_with_the_weight_of_a_config_is_training_in_transformers(kind: str, tmp_path: Path) -> None:
    """The balance loss included: with one layer of experts the two losses are one."""
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 1, "hidden_size": 48, "vocab_size": 101, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.7, "output_router_logits": True,
    }  # fmt: skip
    own = {
        "mixtral": {"num_local_experts": 6, "intermediate_size": 24},
        "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    }
    make = {"mixtral": (T.MixtralForCausalLM, T.MixtralConfig), "qwen3_moe": (T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig)}
    theirs = make[kind][0](make[kind][1](**sizes, **own[kind])).train()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    spec = from_config(theirs.config.to_dict())
    ours = build_model(spec)
    ours.load_state_dict(from_hf(entries(spec), load_file(tmp_path / "model.safetensors")))
    tokens, labels = torch.randint(0, 101, (2, 2, 17))
    theirs(input_ids=tokens, labels=labels, shift_labels=labels).loss.backward()
    # As training does it: the sum is differentiated, and its gradient divided once.
    ours(tokens, labels, Objective()).total.backward()
    expected = gradients_by_our_names(Pair(spec, ours, theirs, tmp_path), tmp_path / "gradients")
    for name, parameter in ours.named_parameters():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            parameter.grad / labels.numel(),
            expected[name],
            rtol=1e-4,
            atol=1e-5 * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def gradients_by_our_names(pair: Pair, where: Path) -> dict[str, Tensor]:
    """Their gradients, written as if they were weights."""
    carrier = copy.deepcopy(pair.theirs)
    with torch.no_grad():
        for mine, original in zip(carrier.parameters(), pair.theirs.parameters(), strict=True):
            mine.copy_(original.grad)
    carrier.save_pretrained(where)
    return from_hf(entries(pair.spec), load_file(where / "model.safetensors"))


def test_what_we_write_is_what_they_write_and_they_load_it(pair: Pair) -> None:
    written = pair.files / "model.safetensors"
    original = load_file(written)
    exported = to_hf(entries(pair.spec), dict(pair.ours.named_parameters()))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in exported)
    save_file({name: tensor.detach() for name, tensor in exported.items()}, written, metadata={"format": "pt"})
    again = type(pair.theirs).from_pretrained(pair.files).eval()
    tokens = torch.randint(0, 101, (1, 9))
    assert torch.equal(again(tokens).logits, pair.theirs(tokens).logits)


def test_a_gated_shared_expert_is_qwen2s() -> None:
    config = T.Qwen2MoeConfig(
        hidden_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=6,
        num_experts_per_tok=2, norm_topk_prob=False,
    )  # fmt: skip
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    theirs: nn.Module = Qwen2MoeSparseMoeBlock(config)
    spec = resolve_model(
        "mixtral-8x7b",
        [*SMALL, "layers=1", "moe={experts: 6, ffn: 24, norm_topk: false, shared_experts: 1, shared_gate: true}"],
    )
    ours = build_model(spec).layers["0"].mlp
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(0.0, 0.2)
    state = theirs.state_dict()
    gate, up = state["experts.gate_up_proj"].chunk(2, dim=1)
    ours.load_state_dict(
        {"router.weight": state["gate.weight"], "experts.gate": gate, "experts.up": up}
        | {"experts.down": state["experts.down_proj"], "shared_gate.weight": state["shared_expert_gate.weight"]}
        | {f"shared.{name}.weight": state[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")}
    )
    x = torch.randn(2, 9, 48)
    torch.testing.assert_close(ours(x, None)[0], theirs(x), rtol=1e-5, atol=1e-5)

"""Every decoder family computes what transformers computes: logits, loss and gradients, weights copied both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from argosy.checkpoint.hf.hf_convert import entries, from_hf, to_hf
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.families.architecture import attention_kind
from argosy.families.hf_config import from_config
from argosy.model.build import build_model, initialise
from argosy.model.objective import Objective
from argosy.model.positions import rope_frequencies, rope_tables

T = transformers
SMALL = ["layers=3", "hidden=48", "vocab_size=101", "max_seq_len=40"]
GQA = {"num_hidden_layers": 3, "hidden_size": 48, "vocab_size": 101, "max_position_embeddings": 40}


def _llama_like(**more: Any) -> dict[str, Any]:
    return (
        GQA
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80, "attention_dropout": 0.0}
        | more
    )


CASES: dict[str, tuple[str, list[str], Any]] = {
    "gpt2": (
        "gpt2",
        ["heads=4"],
        lambda: T.GPT2LMHeadModel(T.GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=101, n_positions=40)),
    ),
    "llama2": (
        "llama2-7b",
        ["heads=6", "kv_heads=6", "ffn=80"],
        lambda: T.LlamaForCausalLM(T.LlamaConfig(**_llama_like(num_key_value_heads=6, rms_norm_eps=1e-5))),
    ),
    "llama3-gqa-tied": (
        "llama3-1b",
        ["heads=6", "kv_heads=2", "ffn=80"],
        lambda: T.LlamaForCausalLM(
            T.LlamaConfig(
                **_llama_like(rms_norm_eps=1e-5, tie_word_embeddings=True),
                rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            )
        ),
    ),
    "llama3-scaled": (
        "llama3-8b",
        [
            "heads=4",
            "kv_heads=2",
            "ffn=80",
            "head_dim=32",
            "rope_theta=100",
            "rope_scaling={kind: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_seq_len: 16}",
        ],
        lambda: T.LlamaForCausalLM(
            T.LlamaConfig(
                **_llama_like(num_attention_heads=4, head_dim=32, rms_norm_eps=1e-5),
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 100.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            )
        ),
    ),
    "llama-linear": (
        "llama2-7b",
        ["heads=6", "kv_heads=6", "ffn=80", "rope_scaling={kind: linear, factor: 4}"],
        lambda: T.LlamaForCausalLM(
            T.LlamaConfig(
                **_llama_like(num_key_value_heads=6, rms_norm_eps=1e-5),
                rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            )
        ),
    ),
    "llama-biases": (
        "llama2-7b",
        ["heads=6", "kv_heads=6", "ffn=80", "attention_bias=true", "mlp_bias=true"],
        lambda: T.LlamaForCausalLM(
            T.LlamaConfig(**_llama_like(num_key_value_heads=6, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True))
        ),
    ),
    "mistral-window": (
        "mistral-7b",
        ["heads=6", "kv_heads=2", "ffn=80", "window=7"],
        lambda: T.MistralForCausalLM(T.MistralConfig(**_llama_like(rms_norm_eps=1e-5, sliding_window=7))),
    ),
    "qwen3": (
        "qwen3-0.6b",
        ["heads=6", "kv_heads=2", "ffn=80", "head_dim=16"],
        lambda: T.Qwen3ForCausalLM(
            T.Qwen3Config(
                **_llama_like(head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6),
                rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            )
        ),
    ),
    "gemma3": (
        "gemma3-1b",
        [
            "heads=6",
            "kv_heads=2",
            "ffn=80",
            "head_dim=16",
            "window=7",
            "global_every=2",
            "query_pre_attn_scalar=11",
            "rope_scaling={kind: linear, factor: 8}",
        ],
        lambda: T.Gemma3ForCausalLM(
            T.Gemma3TextConfig(
                **_llama_like(head_dim=16, query_pre_attn_scalar=11, sliding_window=7, sliding_window_pattern=2),
                pad_token_id=None,  # the row of a padding token gets no gradient
                rope_scaling={"rope_type": "linear", "factor": 8.0},
            )
        ),
    ),
    "mpt": (
        "mpt-125m-alibi",
        ["heads=4"],
        lambda: T.MptForCausalLM(T.MptConfig(d_model=48, n_heads=4, n_layers=3, vocab_size=101, max_seq_len=40)),
    ),
    "mpt-6-heads": (
        "mpt-125m-alibi",
        ["heads=6"],
        lambda: T.MptForCausalLM(T.MptConfig(d_model=48, n_heads=6, n_layers=3, vocab_size=101, max_seq_len=40)),
    ),
}


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[ModelSpec, torch.nn.Module, torch.nn.Module]:
    """(spec, our model, theirs) with the same random weights, biases and norms included."""
    preset, changes, make = CASES[request.param]
    spec = resolve_model(preset, SMALL + changes)
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
    ours = build_model(spec)
    weights = {k: v.detach().clone() for k, v in theirs.state_dict().items()}
    ours.load_state_dict(from_hf(entries(spec), weights))
    return spec, ours.eval(), theirs


def test_logits_and_loss_are_equal(pair: tuple[ModelSpec, torch.nn.Module, torch.nn.Module]) -> None:
    spec, ours, theirs = pair
    tokens = torch.randint(0, spec.vocab_size, (2, 33))
    expected = theirs(input_ids=tokens).logits
    found = ours(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    loss = ours(tokens[:, :-1], tokens[:, 1:], Objective()).cross_entropy / tokens[:, 1:].numel()
    assert float(loss) == pytest.approx(float(theirs(input_ids=tokens, labels=tokens).loss), rel=1e-5)


def test_gradients_are_equal(pair: tuple[ModelSpec, torch.nn.Module, torch.nn.Module]) -> None:
    spec, ours, theirs = pair
    tokens, labels = torch.randint(0, spec.vocab_size, (2, 2, 33))
    ours(tokens, labels, Objective()).total.backward()
    F.cross_entropy(theirs(input_ids=tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = from_hf(entries(spec), {k: p.grad for k, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_weights_survive_the_way_there_and_back(pair: tuple[ModelSpec, torch.nn.Module, torch.nn.Module]) -> None:
    spec, ours, theirs = pair
    weights = dict(ours.named_parameters())
    exported = to_hf(entries(spec), weights)
    original = theirs.state_dict()
    assert all(torch.equal(exported[name], original[name]) for name in exported)
    assert set(original) - set(exported) <= {"lm_head.weight"} if spec.tied else set(original) == set(exported)
    back = from_hf(entries(spec), exported)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_token_never_sees_the_future(pair: tuple[ModelSpec, torch.nn.Module, torch.nn.Module]) -> None:
    spec, ours, _ = pair
    tokens = torch.randint(0, spec.vocab_size, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % spec.vocab_size
    torch.testing.assert_close(ours(tokens)[:, :12], ours(changed)[:, :12], rtol=0, atol=1e-5)


def test_a_fresh_model_starts_near_the_uniform_guess() -> None:
    spec = resolve_model("gpt2", [*SMALL, "heads=4"])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    tokens = torch.randint(0, 101, (4, 40))
    loss = model(tokens, tokens.roll(-1, 1), Objective()).cross_entropy / tokens.numel()
    assert float(loss) == pytest.approx(torch.tensor(101.0).log().item(), abs=0.05)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
def test_angles_of_far_tokens_are_theirs_to_the_last_bit(head_dim: int, scaling: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    more = {
        "default": {},
        "linear": {"factor": 3.0},
        "llama3": {
            "factor": 6.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    for theta in (777.0, 1e4, 5e5):
        config = T.LlamaConfig(
            hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072,
            rope_parameters={"rope_type": scaling, "rope_theta": theta} | more[scaling],
        )  # fmt: skip
        positions = torch.tensor([[0, 1, 77, 4095, 131071]])
        expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        spec = from_config(config.to_dict())
        found = rope_tables(
            positions, rope_frequencies(head_dim, attention_kind(spec, local=False), torch.device("cpu"))
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs[..., : head_dim // 2])

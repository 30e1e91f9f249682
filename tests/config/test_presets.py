"""Parameter counts are computed, and equal those of transformers and of the model Argosy builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config.counts import count_parameters, training_flops_per_token
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.families.family_registry import ALIASES, PRESETS
from argosy.model.build import build_model


@pytest.mark.parametrize("name", PRESETS)
def test_counts_equal_transformers(name: str) -> None:
    spec = resolve_model(name)
    with torch.device("meta"):
        theirs = _reference(spec)
    assert count_parameters(spec).total == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_counts_equal_the_model_we_build(name: str) -> None:
    spec = resolve_model(name)
    model = build_model(spec, "meta")
    assert count_parameters(spec).total == sum(p.numel() for p in model.parameters())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpt2", "llama2-7b", "mpt-125m-alibi"]),
    st.fixed_dictionaries(
        {},
        optional={
            "attention_bias": st.booleans(), "mlp_bias": st.booleans(), "tied": st.booleans(), "qk_norm": st.booleans(),
            "activation": st.sampled_from(["gelu", "relu", "swiglu"]), "positions": st.sampled_from(["learned", "rope", "alibi"]),
            "norm": st.sampled_from([("layernorm", True), ("layernorm", False), ("rmsnorm", False)]),
            "kv_heads": st.sampled_from([1, 2, 4]), "head_dim": st.sampled_from([8, 24]), "ffn": st.integers(1, 99),
        },
    ),
)  # fmt: skip
def test_counts_equal_the_decoder_we_build_whatever_is_changed(name: str, changes: dict[str, Any]) -> None:
    norm = changes.pop("norm", None)
    if norm is not None:
        changes |= {"norm": norm[0], "norm_bias": norm[1]}
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "vocab_size": 99, "max_seq_len": 16} | changes
    spec = resolve_model(name, [f"{key}={str(value).lower()}" for key, value in sizes.items()])
    assert count_parameters(spec).total == sum(p.numel() for p in build_model(spec, "meta").parameters())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["bert-base", "t5-small"]),
    st.fixed_dictionaries(
        {},
        optional={
            "attention_bias": st.booleans(), "mlp_bias": st.booleans(), "tied": st.booleans(), "qk_norm": st.booleans(),
            "activation": st.sampled_from(["gelu", "relu", "swiglu", "geglu"]), "kv_heads": st.sampled_from([1, 2, 4]),
            "norm": st.sampled_from([("layernorm", True), ("layernorm", False), ("rmsnorm", False)]),
            "head_dim": st.sampled_from([8, 24]), "ffn": st.integers(1, 99), "own": st.sampled_from([1, 3]),
            "pair": st.sampled_from(["nsp", "sop", "none"]),
            "retrieval": st.sampled_from(["{}", "{shared: true}", "{shared: true, projection: 5}", "{projection: 7}"]),
        },
    ),
)  # fmt: skip
def test_counts_equal_the_encoder_we_build_whatever_is_changed(name: str, changes: dict[str, Any]) -> None:
    norm, pair, retrieval = (changes.pop(key, None) for key in ("norm", "pair", "retrieval"))
    if norm is not None:
        changes |= {"norm": norm[0], "norm_bias": norm[1]}
    if pair is not None and name == "bert-base":
        changes["pair"] = pair
        if pair == "none" and retrieval is not None:
            changes["retrieval"] = retrieval
            # A retriever has no output head to untie.
            changes.pop("tied", None)
    own = changes.pop("own", 2)
    changes["type_vocab_size" if name == "bert-base" else "decoder_layers"] = own
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "vocab_size": 99, "max_seq_len": 16} | changes
    spec = resolve_model(name, [f"{key}={str(value).lower()}" for key, value in sizes.items()])
    assert count_parameters(spec).total == sum(p.numel() for p in build_model(spec, "meta").parameters())


@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {"experts": st.integers(2, 5), "top_k": st.integers(1, 2), "ffn": st.integers(1, 40)},
        optional={
            "shared_experts": st.integers(1, 3), "shared_gate": st.booleans(), "dense_layers": st.integers(0, 2),
            "bias_rate": st.sampled_from([0.0, 0.001]), "router": st.sampled_from(["softmax", "sigmoid"]),
        },
    ),
    st.sampled_from(["gelu", "swiglu"]),
)  # fmt: skip
def test_counts_equal_the_mixture_we_build(moe: dict[str, Any], activation: str) -> None:
    if "shared_experts" not in moe:
        moe["shared_gate"] = False
    row = ", ".join(f"{key}: {str(value).lower()}" for key, value in moe.items())
    sizes = ["layers=3", "hidden=32", "heads=4", "vocab_size=99", "max_seq_len=16", f"activation={activation}"]
    spec = resolve_model("llama2-7b", [*sizes, "kv_heads=4", f"moe={{{row}}}"])
    model = build_model(spec, "meta")
    counts = count_parameters(spec)
    assert counts.total == sum(p.numel() for p in model.parameters())
    idle = sum(p.numel() // moe["experts"] for name, p in model.named_parameters() if ".experts." in name)
    assert counts.total - counts.active == idle * (moe["experts"] - moe["top_k"])


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("moe-3.5b-a1.1b", 3_550),
        # Azure's label is wrong: the model has 65 M parameters.
        ("375m", 65),
        ("857m", 356),
        ("gpt2", 124),
        ("gpt2-large", 774),
        ("gpt3-175b", 174_600),
        ("310.1b", 310_100),
        ("llama2-7b", 6_738),
        ("llama3-405b", 405_853),
        ("mixtral-8x7b", 46_703),
        ("bert-base", 110),
        ("t5-11b", 11_307),
    ],
)
def test_well_known_sizes(name: str, millions: int) -> None:
    assert count_parameters(resolve_model(name)).total / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "seq_len", "gigaflops"),
    # Megatron-Bridge's counts.
    [("llama3-8b", 8192, 51.5), ("llama3-70b", 8192, 449), ("llama3-405b", 8192, 2521)],
)
def test_flops_follow_the_named_convention(name: str, seq_len: int, gigaflops: float) -> None:
    assert training_flops_per_token(resolve_model(name), seq_len) / 1e9 == pytest.approx(gigaflops, rel=0.005)


def test_experts_a_token_does_not_visit_are_not_active() -> None:
    counts = count_parameters(resolve_model("qwen3-30b-a3b"))
    assert counts.active / 1e9 == pytest.approx(3.35, abs=0.02)
    assert count_parameters(resolve_model("moe-3.5b-a1.1b")).active / 1e9 == pytest.approx(1.14, abs=0.005)


def test_a_window_makes_attention_cheaper_only_when_it_cuts() -> None:
    full, cut = resolve_model("mistral-7b", ["window=null"]), resolve_model("mistral-7b")
    assert training_flops_per_token(cut, 4096) == training_flops_per_token(full, 4096)
    assert training_flops_per_token(cut, 8192) < training_flops_per_token(full, 8192)


def test_aliases_lead_to_presets() -> None:
    assert all(target in PRESETS for target in ALIASES.values())
    assert resolve_model("7.5b") == resolve_model("gpt3-7.5b")


def _reference(spec: ModelSpec) -> torch.nn.Module:
    """Return the uninitialised transformers model of the same shape."""
    sizes: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.max_seq_len,
    }
    gqa = sizes | {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, "tie_word_embeddings": spec.tied}
    t = transformers
    if spec.family == "gpt":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=spec.vocab_size,
                n_positions=spec.max_seq_len,
                n_embd=spec.hidden,
                n_layer=spec.layers,
                n_head=spec.heads,
            )
        )
    if spec.family == "mpt":
        return t.MptForCausalLM(
            t.MptConfig(d_model=spec.hidden, n_heads=spec.heads, n_layers=spec.layers, vocab_size=spec.vocab_size)
        )
    if spec.family == "gemma3":
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**gqa))
    if spec.retrieval is not None:
        width = spec.retrieval.projection
        towers = [t.BertModel(t.BertConfig(**sizes), add_pooling_layer=False) for _ in range(2)]
        return torch.nn.ModuleList([*towers, *(torch.nn.Linear(spec.hidden, width) for _ in range(2))])
    if spec.family == "bert":
        return t.BertForPreTraining(t.BertConfig(**sizes))
    if spec.family == "t5":
        model = t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=spec.vocab_size, d_model=spec.hidden, d_kv=spec.head_dim, d_ff=spec.ffn,
                num_layers=spec.layers, num_decoder_layers=spec.decoder_layers, num_heads=spec.heads,
                feed_forward_proj="gated-gelu" if spec.gated else "relu",
            )
        )  # fmt: skip
        # transformers ties the weights whatever the configuration says.
        if not spec.tied:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        return model
    if spec.moe is None:
        return t.Qwen3ForCausalLM(t.Qwen3Config(**gqa)) if spec.qk_norm else t.LlamaForCausalLM(t.LlamaConfig(**gqa))
    moe = spec.moe
    if moe.shared_experts:
        return t.Glm4MoeForCausalLM(
            t.Glm4MoeConfig(
                **gqa, n_routed_experts=moe.experts, n_shared_experts=moe.shared_experts, num_experts_per_tok=moe.top_k,
                moe_intermediate_size=moe.ffn, first_k_dense_replace=moe.dense_layers, attention_bias=False,
                use_qk_norm=False,
            )
        )  # fmt: skip
    if spec.qk_norm:
        return t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                **gqa, num_experts=moe.experts, num_experts_per_tok=moe.top_k, moe_intermediate_size=moe.ffn
            )
        )
    return t.MixtralForCausalLM(t.MixtralConfig(**gqa, num_local_experts=moe.experts, num_experts_per_tok=moe.top_k))

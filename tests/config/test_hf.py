"""config.json and the model spec: the same model both ways, and whatever cannot be said is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as T

from argosy.config.resolve import resolve_model
from argosy.config.start import differences
from argosy.errors import ArgosyError
from argosy.families.family_registry import FAMILIES
from argosy.families.hf_config import export_gap, from_config, is_exportable, to_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "gpt2": T.GPT2Config,
    "llama": T.LlamaConfig,
    "mistral": T.MistralConfig,
    "qwen3": T.Qwen3Config,
    "gemma3_text": T.Gemma3TextConfig,
    "mixtral": T.MixtralConfig,
    "qwen3_moe": T.Qwen3MoeConfig,
    "mpt": T.MptConfig,
    "bert": T.BertConfig,
    "t5": T.T5Config,
}
PRESETS = {
    "gpt2": "gpt2",
    "gpt3-1.3b": "gpt2",
    "llama2-7b": "llama",
    "llama3-1b": "llama",
    "mistral-7b": "mistral",
    "qwen3-0.6b": "qwen3",
    "gemma3-270m": "gemma3_text",
    "gemma3-1b": "gemma3_text",
    "mixtral-8x7b": "mixtral",
    "qwen3-30b-a3b": "qwen3_moe",
    "moe-3.5b-a1.1b": "mixtral",
    "mpt-7b": "gpt2",
    "mpt-7b-alibi": "mpt",
    "bert-base": "bert",
    "t5-small": "t5",
    "t5-v1.1-small": "t5",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_a_file_leaves_out_is_what_transformers_takes_for_it(kind: str) -> None:
    assert from_config({"model_type": kind}) == from_config(CLASSES[kind]().to_dict())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_written_and_read_back_the_same(preset: str) -> None:
    spec = resolve_model(preset)
    document = to_config(spec)
    assert document["model_type"] == PRESETS[preset]
    assert set(export_gap(spec, document)) <= {"preset", "moe.balance_loss"}
    assert set(export_gap(from_config(document), to_config(from_config(document)))) == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_reads_what_we_write_as_the_same_model(preset: str) -> None:
    document = to_config(resolve_model(preset))
    theirs = CLASSES[document["model_type"]].from_dict(document)
    assert from_config(theirs.to_dict()) == from_config(document)


def test_rotary_scaling_is_read_in_the_old_and_the_new_form() -> None:
    base = {"model_type": "llama", "max_position_embeddings": 131072}
    old = from_config(base | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = from_config(base | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling is not None
    assert old.rope_scaling.original_seq_len == 8192
    very_old = from_config(base | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert very_old.rope_scaling is not None
    assert very_old.rope_scaling.kind == "linear"
    assert from_config(to_config(old)) == old


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"attn_pdrop": 0.0}, "attn_pdrop"),
        ("gpt2", {"activation_function": "silu"}, "activation_function"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 5}, "max_window_layers"),
        ("qwen3", {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]}, "layer_types"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"layer_types": ["full_attention"] + ["sliding_attention"] * 25}, "layer_types"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type",
        ),
        ("mpt", {"attn_config": {"rope": True}}, "rope"),
        ("mpt", {"attn_config": {"sliding_window_size": 128}}, "sliding_window_size"),
        ("mpt", {"attn_config": {"attn_temperature_tuning": {"attn_scale": 0.1}}}, "attn_scale"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config"),
        ("mpt", {"norm_eps": 1e-6}, "norm_eps"),
        ("mpt", {"attn_config": {"clip_qkv": 8}}, "clip_qkv"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"expansion_ratio": 3}, "expansion_ratio"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": [0, 5]}, "mlp_only_layers"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"hidden_dropout_prob": 0.0}, "attention_probs_dropout_prob"),
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj"),
        ("t5", {"feed_forward_proj": "relu", "dense_act_fn": "gelu_new"}, "dense_act_fn"),
        ("t5", {"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "is_gated_act"),
        ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": True}, "scale_decoder_outputs"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ("qwen3", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("qwen3", {"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ("qwen3", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta"),
        ("t5", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
        ("gemma2", {}, "model_type"),
    ],
)
def test_what_changes_the_numbers_and_cannot_be_said_is_refused_by_name(kind: str, changes: Any, key: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        from_config({"model_type": kind} | changes)
    assert refused.value.code == "hf.unsupported"
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("preset", "change", "key"),
    [
        ("gpt2", "attention_bias=false", "model.attention_bias"),
        ("gpt2", "qk_norm=true", "model.qk_norm"),
        ("gpt2", "activation=swiglu", "model.activation"),
        ("bert-base", "activation=geglu", "model.activation"),
        ("mpt-7b-alibi", "ffn=100", "model.ffn"),
        ("mistral-7b", "attention_bias=true", "model.attention_bias"),
        ("llama2-7b", "positions=alibi", "model.positions"),
        ("mixtral-8x7b", "moe.router=sigmoid", "model.moe.router"),
        ("mixtral-8x7b", "moe.bias_rate=0.001", "model.moe.bias_rate"),
        ("qwen3-30b-a3b", "moe.routed_scale=2.5", "model.moe.routed_scale"),
        ("deepseek-moe-16b", "moe.dense_layers=0", "model.moe.shared_experts"),
        ("mpt-7b-alibi", "moe={experts: 4, top_k: 2, ffn: 64}", "model.moe.experts"),
    ],
)
def test_a_model_none_of_their_classes_computes_is_not_exported(preset: str, change: str, key: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        to_config(resolve_model(preset, [change]))
    assert refused.value.code == "hf.unsupported"
    assert refused.value.key == key


SMALL = {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300, "max_seq_len": 64}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_exported_at_its_defaults(family: str) -> None:
    spec = resolve_model({"family": family, **SMALL})
    assert is_exportable(spec)
    # A run may start from what was exported.
    assert list(differences(spec, from_config(to_config(spec)))) == []


@pytest.mark.parametrize(
    ("left_out", "written"),
    [
        ([], ["query_pre_attn_scalar=8"]),
        (["local_rope_theta=null"], ["local_rope_theta=1e6"]),
        (["global_every=null"], ["global_every=3"]),
    ],
)
def test_a_value_that_is_left_out_is_exported_as_the_one_it_stands_for(left_out: list[str], written: list[str]) -> None:
    plain = {"family": "gemma3", **SMALL}
    assert to_config(resolve_model(plain, left_out)) == to_config(resolve_model(plain, written))


def test_a_window_or_a_base_that_is_changed_is_the_only_difference() -> None:
    start = resolve_model({"family": "llama", **SMALL})
    for key, value in (("window", 9), ("rope_theta", 5e5), ("query_pre_attn_scalar", 4)):
        changed = start.model_copy(update={key: value})
        assert [name for name, _, _ in differences(changed, start)] == [key]
        windowed = start.model_copy(update={"window": 5})
        assert [name for name, _, _ in differences(windowed.model_copy(update={key: value}), windowed)] == [key]


def test_qwen_windows_cover_all_layers_or_none() -> None:
    base = {"model_type": "qwen3", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64}
    assert from_config(base | {"max_window_layers": 4}).window is None
    assert from_config(base | {"max_window_layers": 0}).window == 64
    windowed = from_config(base | {"max_window_layers": 0})
    assert from_config(to_config(windowed)) == windowed


def test_a_rotary_base_of_zero_is_not_taken_for_the_default() -> None:
    with pytest.raises(ArgosyError, match="rope_theta"):
        from_config({"model_type": "llama", "rope_parameters": {"rope_theta": 0.0}})


def test_a_config_that_describes_no_model_says_why() -> None:
    with pytest.raises(ArgosyError, match="not divisible"):
        from_config({"model_type": "gpt2", "n_embd": 100, "n_head": 7})


# As their authors published them, shortened to what differs from the defaults, with the keys that only clutter.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257,
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "summary_type": "cls_index", "summary_activation": None,
        "summary_use_proj": True, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama2-7b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mpt-7b-alibi": {
        "model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 4096, "n_heads": 32, "n_layers": 32,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
        },
        "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "emb_pdrop": 0, "embedding_fraction": 1.0,
        "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": True,
        "logit_scale": None, "max_seq_len": 2048, "no_bias": True, "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "vocab_size": 50368,
    },
    "mpt-1b-alibi": {
        "model_type": "mpt", "d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50368, "max_seq_len": 2048,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "flash", "attn_logit_softcapping": None, "attn_pdrop": 0.0,
            "attn_temperature_tuning": {"attn_scale": 0.0, "floor_scale": 8192}, "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False, "clip_qkv": None, "fused_qkv": True, "kv_dim": None, "nope": False,
            "qk_gn": False, "qk_ln": False, "rope": False, "rope_hf_config": {"factor": 1.0, "type": "no_scaling"},
            "rope_impl": "dail", "rope_theta": 10000, "sliding_window_size": -1, "softmax_scale": None,
        },
        "attention_bias": None, "block_overrides": None, "emb_pdrop": 0.0, "expansion_ratio": 4, "fc_type": {"name": "torch"},
        "ffn_config": {"ffn_type": "mptmlp"}, "final_logit_softcapping": None, "head_dim": None, "norm_eps": 1e-05,
        "init_config": {"name": "kaiming_normal_"}, "learned_pos_emb": False, "no_bias": True, "resid_pdrop": 0.0,
        "tie_word_embeddings": True, "use_pad_tok_in_ffn": True,
    },
    "bert-base": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "gradient_checkpointing": False, "hidden_act": "gelu",
        "position_embedding_type": "absolute", "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30522,
    },
    "t5-small": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "is_encoder_decoder": True, "n_positions": 512, "num_heads": 8, "num_layers": 6,
        "output_past": True, "relative_attention_num_buckets": 32, "vocab_size": 32128,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_models_are_our_presets(preset: str) -> None:
    free = {"preset": None, "dropout": 0.0, "pair": None}
    found, ours = from_config(PUBLISHED[preset]), resolve_model(preset)
    assert found.model_copy(update=free) == ours.model_copy(update=free)

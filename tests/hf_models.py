"""Small random Hugging Face models of every family, saved as their authors would save them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def _gated(**more: Any) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 257, "max_position_embeddings": 64,
        "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80, "bos_token_id": 256,
        "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    return sizes | more


DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=257, n_positions=64, bos_token_id=256, eos_token_id=256)
    ),
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**_gated())),
    "llama3": lambda: T.LlamaForCausalLM(
        T.LlamaConfig(**_gated(tie_word_embeddings=True, head_dim=16), rope_parameters=LLAMA3)
    ),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**_gated(sliding_window=9))),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**_gated(head_dim=16))),
    "gemma3_text": lambda: T.Gemma3ForCausalLM(
        T.Gemma3TextConfig(
            **_gated(head_dim=16, query_pre_attn_scalar=11, sliding_window=9),
            layer_types=["sliding_attention", "full_attention"],
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    ),
    "mpt": lambda: T.MptForCausalLM(
        T.MptConfig(d_model=48, n_heads=4, n_layers=2, vocab_size=257, max_seq_len=64, eos_token_id=256)
    ),
    "mixtral": lambda: T.MixtralForCausalLM(
        T.MixtralConfig(**_gated(num_local_experts=4, num_experts_per_tok=2, intermediate_size=24))
    ),
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(
            **_gated(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0])
        )
    ),
}
_BERT = {
    "num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 257, "max_position_embeddings": 64,
    "num_attention_heads": 6, "intermediate_size": 80,
}  # fmt: skip
_T5 = {
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 80,
    "num_heads": 6,
    "vocab_size": 257,
}
MODELS: dict[str, Callable[[], Any]] = DECODERS | {
    "bert": lambda: T.BertForPreTraining(T.BertConfig(**_BERT)),
    "bert-masked": lambda: T.BertForMaskedLM(T.BertConfig(**_BERT)),
    "bert-untied": lambda: T.BertForMaskedLM(
        T.BertConfig(**_BERT, tie_word_embeddings=False, type_vocab_size=3, hidden_act="gelu_new", layer_norm_eps=1e-5)
    ),
    "t5": lambda: T.T5ForConditionalGeneration(T.T5Config(**_T5)),
    "t5-1.1": lambda: T.T5ForConditionalGeneration(
        T.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "t5-silu": lambda: T.T5ForConditionalGeneration(T.T5Config(**_T5, feed_forward_proj="gated-silu")),
}


def save(kind: str, directory: Path, vocab_size: int = 257, **options: Any) -> Any:
    """The model, with weights larger than a fresh one's so that differences show, saved in a directory."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    if vocab_size != model.config.vocab_size:
        model.resize_token_embeddings(vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory, **options)
    return model

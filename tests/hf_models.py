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
    "mpt": lambda: T.MptForCausalLM(
        T.MptConfig(d_model=48, n_heads=4, n_layers=2, vocab_size=257, max_seq_len=64, eos_token_id=256)
    ),
}


def save(kind: str, directory: Path, **options: Any) -> Any:
    """The model, with weights larger than a fresh one's so that differences show, saved in a directory."""
    torch.manual_seed(0)
    model = DECODERS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory, **options)
    return model

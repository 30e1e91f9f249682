"""Model presets: the structure of each family, and the sizes of each preset.

A preset has the name people use for the model, which may be wrong about its size. `argosy.config.counts` computes the size from
these rows: Azure's "375m" example has 65 M parameters, and `argosy config models` prints 65 M.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

FAMILIES: dict[str, Row] = {
    "gpt": {
        "architecture": "decoder", "positions": "learned", "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-5,
        "activation": "gelu_tanh", "attention_bias": True, "mlp_bias": True, "tied": True,
    },
    "llama": {
        "architecture": "decoder", "positions": "rope", "norm": "rmsnorm", "norm_bias": False, "norm_eps": 1e-5,
        "activation": "swiglu", "attention_bias": False, "mlp_bias": False, "tied": False,
    },
    "mpt": {
        "architecture": "decoder", "positions": "alibi", "norm": "layernorm", "norm_bias": False, "norm_eps": 1e-5,
        "activation": "gelu", "attention_bias": False, "mlp_bias": False, "tied": True,
    },
    "bert": {
        "architecture": "encoder", "positions": "learned", "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-12,
        "activation": "gelu", "attention_bias": True, "mlp_bias": True, "tied": True, "type_vocab_size": 2,
        "pair": "nsp", "dropout": 0.1,
    },
    "t5": {
        "architecture": "encoder-decoder", "positions": "relative", "norm": "rmsnorm", "norm_bias": False,
        "norm_eps": 1e-6, "activation": "relu", "attention_bias": False, "mlp_bias": False, "tied": True,
        "init_std": 1.0, "dropout": 0.1,
    },
}  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, *, seq: int = 2048, vocab: int = 50257) -> Row:
    return {
        "family": "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab_size": vocab,
        "max_seq_len": seq,
    }


def _mpt(layers: int, hidden: int, heads: int) -> Row:
    return {
        "family": "mpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab_size": 50368, "max_seq_len": 2048,
    }  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Row:
    row = {"family": "llama", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return row | {"vocab_size": 32000, "max_seq_len": 4096} | more


def _llama3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Row:
    return _llama(
        layers, hidden, heads, 8, ffn, vocab_size=128256, max_seq_len=8192, rope_theta=500_000.0, tied=tied
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Row:
    return _llama(
        layers, hidden, heads, kv_heads, ffn, head_dim=128, vocab_size=151936, max_seq_len=32768,
        rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True, **more,
    )  # fmt: skip


def _bert(layers: int, hidden: int, heads: int) -> Row:
    return {
        "family": "bert", "layers": layers, "hidden": hidden, "heads": heads, "vocab_size": 30522, "max_seq_len": 512,
    }  # fmt: skip


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, **more: Any) -> Row:
    row = {
        "family": "t5", "layers": layers, "hidden": hidden, "heads": heads, "head_dim": head_dim, "ffn": ffn,
        "vocab_size": 32128, "max_seq_len": 512,
    }  # fmt: skip
    return row | more


def _t5_1_1(layers: int, hidden: int, heads: int, ffn: int) -> Row:
    return _t5(layers, hidden, heads, 64, ffn, activation="geglu", tied=False)


PRESETS: dict[str, Row] = {
    # GPT-3: the table of the paper, with head counts that divide the hidden size.
    "gpt3-125m": _gpt(12, 768, 12),
    "gpt3-345m": _gpt(24, 1024, 16, seq=1024),
    "gpt3-357m": _gpt(24, 1024, 16),
    "gpt3-760m": _gpt(24, 1536, 16),
    "gpt3-1.3b": _gpt(24, 2048, 16),
    "gpt3-2.7b": _gpt(32, 2560, 32),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-30b": _gpt(48, 7168, 56),
    "gpt3-175b": _gpt(96, 12288, 96),
    # Sizes of the Azure Megatron-LM example. Their labels are not their parameter counts.
    "gpt3-375m": _gpt(12, 512, 8),
    "gpt3-857m": _gpt(24, 1024, 16),
    # Table 1 of the Megatron-LM scaling paper (arXiv 2104.04473), as the HyperPod example lists it. The vocabulary is padded to 51,200.
    "gpt3-1.7b": _gpt(24, 2304, 24, vocab=51200),
    "gpt3-3.6b": _gpt(30, 3072, 32, vocab=51200),
    "gpt3-7.5b": _gpt(36, 4096, 32, vocab=51200),
    "gpt3-18.4b": _gpt(40, 6144, 48, vocab=51200),
    "gpt3-39.1b": _gpt(48, 8192, 64, vocab=51200),
    "gpt3-76.1b": _gpt(60, 10240, 80, vocab=51200),
    "gpt3-145.6b": _gpt(80, 12288, 96, vocab=51200),
    "gpt3-310.1b": _gpt(96, 16384, 128, vocab=51200),
    "gpt2": _gpt(12, 768, 12, seq=1024),
    "gpt2-medium": _gpt(24, 1024, 16, seq=1024),
    "gpt2-large": _gpt(36, 1280, 20, seq=1024),
    "gpt2-xl": _gpt(48, 1600, 25, seq=1024),
    # MPT: the shapes of LLM-Foundry's pretraining recipes.
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672),
    "llama3-1b": _llama3(16, 2048, 32, 8192, tied=True),
    "llama3-3b": _llama3(28, 3072, 24, 8192, tied=True),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, max_seq_len=8192, window=4096),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14336, max_seq_len=32768, rope_theta=1_000_000.0,
        moe={"experts": 8, "top_k": 2, "ffn": 14336},
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, moe={"experts": 128, "top_k": 8, "ffn": 768, "balance_loss": 0.001}),
    # DeepSeek-MoE: fine-grained experts, two shared experts, a dense first layer, multi-head attention.
    "deepseek-moe-16b": _llama(
        28, 2048, 16, 16, 10944, vocab_size=102400, norm_eps=1e-6,
        moe={
            "experts": 64, "top_k": 6, "ffn": 1408, "shared_experts": 2, "dense_layers": 1, "norm_topk": False,
            "balance_loss": 0.001,
        },
    ),
    # A small mixture of eight experts for benchmarks, named by its counts: 3.55 B parameters, 1.14 B of them active.
    "moe-3.5b-a1.1b": _llama(16, 2048, 16, 8, 4096, moe={"experts": 8, "top_k": 2, "ffn": 4096}),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    # Retrieval by the inverse cloze task (ICT) as in ORQA: two BERT encoders, embeddings of size 128.
    "ict-base": _bert(12, 768, 12) | {"pair": "none", "retrieval": {"projection": 128}},
    "ict-large": _bert(24, 1024, 16) | {"pair": "none", "retrieval": {"projection": 128}},
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    # T5 1.1: a gated MLP and an untied output head.
    "t5-v1.1-small": _t5_1_1(8, 512, 6, 1024),
    "t5-v1.1-base": _t5_1_1(12, 768, 12, 2048),
    "t5-v1.1-large": _t5_1_1(24, 1024, 16, 2816),
    "t5-v1.1-xl": _t5_1_1(24, 2048, 32, 5120),
    "t5-v1.1-xxl": _t5_1_1(24, 4096, 64, 10240),
}  # fmt: skip

# The bare labels of the two cloud examples, so that a user can follow their commands word for word.
ALIASES: dict[str, str] = {
    label: f"gpt3-{label}"
    for label in (
        "125m", "375m", "857m", "1.3b", "13b", "30b", "175b",
        "1.7b", "3.6b", "7.5b", "18.4b", "39.1b", "76.1b", "145.6b", "310.1b",
    )
}  # fmt: skip

"""Mixtures of experts: mixtral and qwen3_moe. The weights of their auxiliary losses are not ours (theirs are of one loss over
all layers, Mixtral's not divided by the experts of a token), and only matter in training: they are passed over."""

from __future__ import annotations

from typing import Any

from argosy.config.hf.decoders import read_gated, write_gated
from argosy.config.hf.keys import Keys
from argosy.config.model import ModelSpec

Tree = dict[str, Any]


def read_mixtral(keys: Keys) -> Tree:
    common = read_gated(keys, kv_heads=8, head_dim=None, max_seq_len=131072, ffn=14336, eps=1e-5, theta=1e6)
    keys.only("router_jitter_noise", 0.0)
    keys.harmless("router_aux_loss_coef")
    moe = {
        "experts": keys.take("num_local_experts", 8),
        "top_k": keys.take("num_experts_per_tok", 2),
        "ffn": common["ffn"],
    }
    return common | {"window": keys.take("sliding_window", None), "moe": moe}


def write_mixtral(spec: ModelSpec) -> Tree:
    document = {"architectures": ["MixtralForCausalLM"], **write_gated(spec), "sliding_window": spec.window}
    if spec.moe is not None:
        document |= {
            "intermediate_size": spec.moe.ffn,
            "num_local_experts": spec.moe.experts,
            "num_experts_per_tok": spec.moe.top_k,
        }
    return document


def read_qwen3_moe(keys: Keys) -> Tree:
    common = read_gated(
        keys, kv_heads=4, head_dim=None, max_seq_len=32768, vocab=151936, ffn=6144, layers=24, hidden=2048
    )
    keys.harmless("router_aux_loss_coef", "max_window_layers")
    keys.only("decoder_sparse_step", 1)
    keys.only("use_qk_norm", True)  # this and the next as Qwen3-Coder has them
    keys.only("shared_expert_intermediate_size", 0)
    dense = keys.listing("mlp_only_layers")
    if set(dense) != set(range(len(dense))):
        raise keys.refuse("mlp_only_layers", dense, "only the first layers can be dense")
    window = keys.take("sliding_window", 4096, null=True) if keys.take("use_sliding_window", False) else None
    experts = keys.take("num_local_experts", 128)  # transformers 5's name for it
    moe = {
        "experts": keys.take("num_experts", experts),
        "top_k": keys.take("num_experts_per_tok", 8),
        "ffn": keys.take("moe_intermediate_size", 768),
        "norm_topk": keys.take("norm_topk_prob", False),
        "dense_layers": len(dense),
    }
    return common | {
        "qk_norm": True,
        "attention_bias": keys.take("attention_bias", False),
        "window": window,
        "moe": moe,
    }


def write_qwen3_moe(spec: ModelSpec) -> Tree:
    document = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **write_gated(spec),
        "attention_bias": spec.attention_bias,
        "use_sliding_window": spec.window is not None,
        "sliding_window": spec.window,
    }
    if spec.moe is not None:
        document |= {
            "num_experts": spec.moe.experts,
            "num_experts_per_tok": spec.moe.top_k,
            "moe_intermediate_size": spec.moe.ffn,
            "norm_topk_prob": spec.moe.norm_topk,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(spec.moe.dense_layers)),
        }
    return document

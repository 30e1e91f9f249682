"""Mixtures of experts: mixtral and qwen3_moe.

Both have one balance loss over the routers of all layers together: `router_aux_loss_coef` times a sum that is `top_k` when
loads are level. Ours is a sum over layers, each 1 when level. Therefore `moe.balance_loss` = coef x top_k / layers with
experts. The loss is then the same when loads are level, and the gradient is the same if all layers have the same loads.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec, MoESpec
from argosy.families.family import Tree
from argosy.families.gated import read_gated, write_gated
from argosy.families.hf_keys import Keys
from argosy.families.weight_table import Entry, Stacked

BALANCE_RULE = "router_aux_loss_coef x top_k / layers with experts"
_FLAG = (
    "transformers adds its balance loss only where it also returns the routers' logits; Argosy whenever it has a weight"
)
# Significant digits of our weight and of theirs. Theirs has more, so that a weight survives the division and multiplication.
_DIGITS, _THEIR_DIGITS = 12, 15


def read_balance(keys: Keys, moe: Tree, layers: int) -> float:
    """Return our weight of the balance loss."""
    keys.ignore(_FLAG, "output_router_logits")
    coef = keys.take("router_aux_loss_coef", 0.001)
    if isinstance(coef, bool) or not isinstance(coef, int | float):
        raise keys.refuse("router_aux_loss_coef", coef, "a number belongs here")
    routed = layers - moe.get("dense_layers", 0)
    top_k = keys.count("num_experts_per_tok", moe["top_k"])
    return float(f"{coef * top_k / max(1, routed):.{_DIGITS}g}")


def write_balance(spec: ModelSpec, moe: MoESpec) -> float:
    """Return their weight of the balance loss, the inverse of `read_balance`."""
    return float(f"{moe.balance_loss * (spec.layers - moe.dense_layers) / moe.top_k:.{_THEIR_DIGITS}g}")


def read_mixtral(keys: Keys) -> Tree:
    common = read_gated(keys, kv_heads=8, head_dim=None, max_seq_len=131072, ffn=14336, eps=1e-5, theta=1e6)
    keys.only("router_jitter_noise", 0.0)
    moe = {
        "experts": keys.take("num_local_experts", 8),
        "top_k": keys.take("num_experts_per_tok", 2),
        "ffn": common["ffn"],
    }
    moe["balance_loss"] = read_balance(keys, moe, common["layers"])
    return common | {"window": keys.take("sliding_window", None), "moe": moe}


def write_mixtral(spec: ModelSpec) -> Tree:
    document = {"architectures": ["MixtralForCausalLM"], **write_gated(spec), "sliding_window": spec.window}
    if spec.moe is not None:
        document |= {
            "intermediate_size": spec.moe.ffn,
            "num_local_experts": spec.moe.experts,
            "num_experts_per_tok": spec.moe.top_k,
            "router_aux_loss_coef": write_balance(spec, spec.moe),
        }
    return document


def read_qwen3_moe(keys: Keys) -> Tree:
    common = read_gated(
        keys, kv_heads=4, head_dim=None, max_seq_len=32768, vocab=151936, ffn=6144, layers=24, hidden=2048
    )
    keys.ignore("Qwen3-MoE's window, where it has one, is of all layers", "max_window_layers")
    keys.only("decoder_sparse_step", 1)
    # Qwen3-Coder has this key and the next two.
    keys.only("use_qk_norm", True)
    keys.only("shared_expert_intermediate_size", 0)
    keys.only("qkv_bias", False)
    dense = keys.listing("mlp_only_layers")
    if not all(isinstance(layer, int) for layer in dense) or set(dense) != set(range(len(dense))):
        raise keys.refuse("mlp_only_layers", dense, "only the first layers can be dense")
    window = keys.take("sliding_window", 4096, null=True)
    if not keys.take("use_sliding_window", False):
        window = None
    # transformers 5's name for num_experts.
    experts = keys.take("num_local_experts", 128)
    moe = {
        "experts": keys.take("num_experts", experts),
        "top_k": keys.take("num_experts_per_tok", 8),
        "ffn": keys.take("moe_intermediate_size", 768),
        "norm_topk": keys.take("norm_topk_prob", False),
        "dense_layers": len(dense),
    }
    moe["balance_loss"] = read_balance(keys, moe, common["layers"])
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
            "router_aux_loss_coef": write_balance(spec, spec.moe),
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(spec.moe.dense_layers)),
        }
    return document


def _is_mixtral(spec: ModelSpec) -> bool:
    """Return whether Mixtral's class can compute this model: a plain softmax router with experts in every layer."""
    moe = spec.moe
    if moe is None or spec.qk_norm or not moe.norm_topk or moe.dense_layers or moe.shared_experts:
        return False
    return moe.router == "softmax" and moe.routed_scale == 1 and moe.groups == 1 and moe.bias_rate is None


def experts_table(spec: ModelSpec, moe: MoESpec, ours: str, theirs: str) -> Iterator[Entry]:
    """Yield the entries of the MoE `ours` of a layer, stored in their layer `theirs`."""
    mixtral = _is_mixtral(spec)
    theirs += ".block_sparse_moe" if mixtral else ".mlp"
    yield Entry(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    if moe.bias_rate is not None:
        yield Entry(f"{ours}.router.bias", (f"{theirs}.gate.e_score_correction_bias",))
    for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        of_each = tuple(
            f"{theirs}.experts.{e}.{short if mixtral else name + '_proj'}.weight" for e in range(moe.experts)
        )
        yield Entry(f"{ours}.experts.{name}", of_each, Stacked())
    # Qwen2-MoE's name, or DeepSeek's.
    shared = "shared_expert" if moe.shared_gate else "shared_experts"
    for name in ("gate", "up", "down") if moe.shared_experts else ():
        yield Entry(f"{ours}.shared.{name}.weight", (f"{theirs}.{shared}.{name}_proj.weight",))
    if moe.shared_gate:
        yield Entry(f"{ours}.shared_gate.weight", (f"{theirs}.shared_expert_gate.weight",))

"""The model that the arguments stored in a Megatron-LM checkpoint describe.

There are hundreds of arguments. Those that change what the model computes are translated, or checked against the values Argosy
supports. The others concern training, layouts and kernels. The tensor shapes then confirm the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.errors import ArgosyError

# argument -> values Argosy supports; any other value makes a different model. Unset is always allowed.
_HELD: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,), "qk_l2_norm": (False,), "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,), "squared_relu": (False,), "quick_geglu": (False,),
    "rotary_percent": (1.0,), "rotary_interleaved": (False,), "window_size": (None,), "mtp_num_layers": (None, 0),
    "attention_output_gate": (False,), "linear_attention_type": (None,),
    "softmax_type": ("vanilla",), "glu_linear_offset": (0.0,), "activation_func_clamp_value": (None,),
    "moe_latent_size": (None,), "heterogeneous_layers_config_path": (None,),
    "moe_apply_probs_on_input": (False,), "no_rope_freq": (None,), "use_legacy_models": (False,),
    "is_hybrid_model": (False,), "hybrid_layer_pattern": (None,), "experimental_attention_variant": (None,),
    "normalization": ("LayerNorm", "RMSNorm"), "position_embedding_type": ("learned_absolute", "rope"),
    "moe_router_score_function": ("softmax", "sigmoid"), "moe_expert_capacity_factor": (None,),
}  # fmt: skip


def model_from_arguments(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of a model spec. `vocab_size` includes Megatron's padding.

    The stored `vocab_size` is not used: only some tokenizers set it, and it does not count the row of the end-of-document token.
    """
    given = _Given(arguments, where)
    for key, allowed in _HELD.items():
        given.hold(key, allowed)
    gated, rms = given.flag("swiglu"), given.get("normalization", "LayerNorm") == "RMSNorm"
    rope = given.flag("use_rotary_position_embeddings") or given.get("position_embedding_type", "") == "rope"
    if not rope and not given.flag("add_position_embedding", default=True):
        raise given.refuse("add_position_embedding", False, "a model without position embeddings is not supported")
    bias = given.flag("add_bias_linear", default=True)
    if given.flag("add_qkv_bias") and not bias:
        raise given.refuse("add_qkv_bias", True, "Argosy has biases in all four projections of attention, or in none")
    # Megatron's fused bias-GELU kernel has the tanh approximation; without it GELU is exact.
    gelu = "gelu_tanh" if given.flag("openai_gelu") or given.flag("bias_gelu_fusion") else "gelu"
    heads = given.need("num_attention_heads")
    return {
        "family": "llama" if gated and rms and rope else "gpt",
        "layers": given.need("num_layers"),
        "hidden": given.need("hidden_size"),
        "heads": heads,
        "kv_heads": given.get("num_query_groups", heads) if given.flag("group_query_attention") else heads,
        "head_dim": given.get("kv_channels", None),
        "ffn": given.get("ffn_hidden_size", None),
        "vocab_size": given.need("padded_vocab_size"),
        "max_seq_len": given.need("max_position_embeddings"),
        "positions": "rope" if rope else "learned",
        "norm": "rmsnorm" if rms else "layernorm",
        "norm_bias": not rms,
        "norm_eps": given.get("norm_epsilon", 1e-5),
        "activation": "swiglu" if gated else gelu,
        "attention_bias": bias,
        "mlp_bias": bias,
        "tied": not given.flag("untie_embeddings_and_output_weights"),
        "qk_norm": given.flag("qk_layernorm"),
        "dropout": min(given.get("hidden_dropout", 0.0), given.get("attention_dropout", 0.0)),
        "init_std": given.get("init_method_std", 0.02),
        **(_rope(given) if rope else {}),
        **({"moe": _experts(given)} if given.get("num_experts", None) else {}),
    }


def most_padding(arguments: Mapping[str, Any], where: str) -> int:
    """Return an upper bound (exclusive) of the rows that padded the vocabulary."""
    given = _Given(arguments, where)
    return int(given.get("make_vocab_size_divisible_by", 128) * given.get("tensor_model_parallel_size", 1))


class _Given:
    def __init__(self, arguments: Mapping[str, Any], where: str) -> None:
        self._arguments, self._where = arguments, where

    def get(self, key: str, default: Any) -> Any:
        value = self._arguments.get(key)
        if value is None:
            return default
        if not isinstance(value, str | int | float | bool | list):
            raise self.refuse(key, type(value).__name__, "a plain value is expected")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise self.refuse(key, None, "the model needs it")
        return value

    def hold(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self._arguments.get(key)
        if value is not None and value not in allowed:
            raise self.refuse(key, value, f"only {' or '.join(repr(one) for one in allowed)} is supported")

    def refuse(self, key: str, value: Any, why: str) -> ArgosyError:
        return ArgosyError(
            "megatron.unsupported",
            f"{self._where} was trained with {key} = {value!r}: {why}",
            key=key,
            value=value,
            fix="import another model; or, if the argument is wrong, describe the model with --model PRESET KEY=VALUE",
        )


def _rope(given: _Given) -> dict[str, Any]:
    scaling = None
    if given.flag("use_rope_scaling"):
        factor = given.get("rope_scaling_factor", 8.0)
        scaling = {"kind": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        # Megatron has this constant, whatever the run's sequence length is.
        scaling["original_seq_len"] = 8192
    elif (factor := given.get("rotary_seq_len_interpolation_factor", None)) is not None:
        scaling = {"kind": "linear", "factor": factor}
    return {"rope_theta": given.get("rotary_base", 10_000), "rope_scaling": scaling}


def _experts(given: _Given) -> dict[str, Any]:
    top_k, score = given.get("moe_router_topk", 2), given.get("moe_router_score_function", "softmax")
    ffn = given.get("moe_ffn_hidden_size", None) or given.need("ffn_hidden_size")
    shared = given.get("moe_shared_expert_intermediate_size", 0)
    if shared % ffn:
        raise given.refuse(
            "moe_shared_expert_intermediate_size", shared, f"it is {shared / ffn:.2f} times an expert's width of {ffn}"
        )
    groups, top_groups = _groups(
        given, top_k, by_logits=score == "softmax" and not given.flag("moe_router_pre_softmax")
    )
    if "sinkhorn" in given.get("moe_router_load_balancing_type", ""):
        raise given.refuse("moe_router_load_balancing_type", "sinkhorn", "Argosy has no Sinkhorn routing")
    biased = given.flag("moe_router_enable_expert_bias")
    balance = given.get("moe_aux_loss_coeff", 0.0)
    return {
        "experts": given.need("num_experts"),
        "top_k": top_k,
        "ffn": ffn,
        "shared_experts": shared // ffn,
        "shared_gate": given.flag("moe_shared_expert_gate"),
        "dense_layers": _dense_layers(given),
        "router": score,
        # Softmax over the top-k logits equals softmax over all logits, normalised over the top k. With pre-softmax routing
        # Megatron does not normalise.
        "norm_topk": top_k > 1 if score == "sigmoid" else not given.flag("moe_router_pre_softmax"),
        "routed_scale": given.get("moe_router_topk_scaling_factor", 1.0) or 1.0,
        "groups": groups,
        "top_groups": top_groups,
        "balance_loss": balance if isinstance(balance, int | float) else 0.0,
        "z_loss": given.get("moe_z_loss_coeff", 0.0),
        "bias_rate": given.get("moe_router_bias_update_rate", 1e-3) if biased else None,
    }


def _groups(given: _Given, top_k: int, *, by_logits: bool) -> tuple[int, int]:
    """Return (expert groups, groups a token may use) for group-limited routing."""
    groups, top = given.get("moe_router_num_groups", 1), given.get("moe_router_group_topk", None)
    if top is None or groups == 1:
        return 1, 1
    if by_logits or top_k // top != 2:
        raise given.refuse(
            "moe_router_group_topk",
            top,
            f"it ranks groups by their {top_k} // {top} best {'logits' if by_logits else 'scores'}, Argosy by their 2 best scores",
        )
    return groups, top


def _dense_layers(given: _Given) -> int:
    """Return the number of leading dense layers. Megatron allows any pattern; Argosy only dense layers before MoE layers."""
    pattern = given.get("moe_layer_freq", 1)
    if pattern == 1:
        return 0
    if isinstance(pattern, list) and 1 in pattern:
        first = pattern.index(1)
        if all(pattern[first:]) and not any(pattern[:first]):
            return int(first)
    raise given.refuse("moe_layer_freq", pattern, "dense layers must come before all MoE layers")

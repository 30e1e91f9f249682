"""The model of a published row: its shape from the columns, and the rest from the row's notes and the model's name.

Latent attention (MLA), shared experts, dense layers, head_dim and multi-token prediction (MTP) have no column.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.planner.gaps import value

from argosy.config.model import ModelSpec
from argosy.families.family_registry import FAMILIES
from argosy.plan.layouts import Latent, Work

HEAD_DIMS = {"qwen3": 128, "gpt-oss": 64, "gptoss": 64, "nemotron-340b": 192, "gemma": 256}
LATENT = r"multi-latent|\bmla\b|deepseek-?v[23]|dsv[23]|kimi-?k2|moonlight"
# Window as a share of the sequence: in all layers it costs as much as a narrow window in every other layer.
EVERY_OTHER = 0.293


def work_of(cells: dict[str, str]) -> Work:
    shape = _shape(cells)
    said = _said(cells)
    latent = None
    if re.search(LATENT, said):
        latent = Latent(query=_number(r"q_lora\D?(?:rank)?\D{0,2}(\d+)", said, 1536 if shape["hidden"] > 2048 else 512))
        shape |= {"head_dim": 128, "kv_heads": shape["heads"]}
    experts = int(value(cells, "moe_experts"))
    if experts:
        shape |= _experts(cells, experts, shape["ffn"], said)
    precision = (cells.get("precision") or "bf16").lower()
    if re.fullmatch(r"(fp|tf|float|bf)?-?32", precision):
        raise ValueError(f"matmuls in {precision} are not predicted")
    precision = "fp4" if "fp4" in precision else "fp8" if "8" in precision else "bf16"
    further = _number(r"mtp-num-layers=(\d+)", said, int("w/ mtp" in said))
    return Work(
        ModelSpec.model_validate(shape),
        shape["max_seq_len"],
        int(value(cells, "global_batch")),
        precision,
        latent,
        further,
    )


def _said(cells: dict[str, str]) -> str:
    return f"{cells['model']} {cells.get('notes') or ''}".lower()


def _number(pattern: str, text: str, otherwise: int) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else otherwise


def _shape(cells: dict[str, str]) -> dict[str, Any]:
    gated, experts, name = cells["gated_mlp"] == "1", value(cells, "moe_experts"), cells["model"].lower()
    family = "mpt" if name.startswith("mpt") else "llama" if gated or experts else "gpt"
    layers, hidden, heads, kv_heads, ffn, vocab, seq_len = (
        int(value(cells, column))
        for column in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len")
    )
    shape: dict[str, Any] = {
        **FAMILIES[family].defaults, "family": family, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "ffn": ffn, "vocab_size": vocab, "max_seq_len": seq_len,
    }  # fmt: skip
    head_dim = next((size for part, size in HEAD_DIMS.items() if part in name), None)
    if head_dim is not None or hidden % heads:
        shape["head_dim"] = head_dim or max(1, round(hidden / heads))
    notes = cells.get("notes") or ""
    if "untie" in notes or "tied" in notes:
        shape["tied"] = "untie" not in notes
    if "alternating sliding-window" in notes:
        shape["window"] = max(1, round(EVERY_OTHER * seq_len))
    if not gated and family != "mpt" and not cells["id"].startswith("argosy"):
        shape["dropout"] = 0.1
    return shape


def _experts(cells: dict[str, str], experts: int, ffn: int, said: str) -> dict[str, Any]:
    """Return the MoE keys of a row. By default a dense layer is as wide as the experts that a token uses together."""
    top_k = int(value(cells, "moe_topk")) or 1
    width = _number(r"shared-expert-intermediate-size=(\d+)", said, 0)
    shared = _number(r"(\d+) shared expert", said, round(width / ffn))
    dense = _number(r"(\d+) dense layers", said, _number(r"moe-layer-freq=\(\[0\]\*(\d+)", said, 0))
    routing = {"experts": experts, "top_k": top_k, "ffn": ffn, "shared_experts": shared, "dense_layers": dense}
    if re.search("deepseek-?v3|dsv3", said) and experts == 256 and "force-balanced" not in said:
        # A token reaches at most four nodes.
        routing |= {"groups": 8, "top_groups": 4}
    return {
        "ffn": _number(r"dense layers ffn ?(\d+)", said, (top_k + shared) * ffn),
        "moe": routing,
        "mlp_bias": False,
        "activation": "swiglu" if cells["gated_mlp"] == "1" else "gelu",
    }

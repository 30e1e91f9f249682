"""Defaults for empty cells of a published row, derived from its other cells or from what was usual.

Examples: the shape of a model with a known name, the last axis if the others and the number of GPUs are known, the sequence length
or batch that follows from step time and throughput. Values that depend on memory (micro-batch, sharding, recompute) are filled in
rows.py.
"""

from __future__ import annotations

import re
from math import sqrt

from benchmarks.planner.spelling import MEASURED, TEXTS, canonical, spelled

from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.families.family_registry import ALIASES, PRESETS
from argosy.plan.hardware import Gpu

MATTER = (
    "gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "gated_mlp", "vocab", "seq_len", "tp", "pp",
    "cp", "ep", "dp", "zero_stage", "sequence_parallel", "recompute", "micro_batch", "global_batch", "precision", "attn_impl",
)  # fmt: skip
NUMBERS = ("gpu_mem_gb", "moe_experts", "moe_topk", "vpp")
GATED = "llama|qwen|mistral|mixtral|deepseek|dsv3|internlm|gpt-?oss|olmo|kimi"
# A larger global batch is in tokens, not in sequences.
MOST_SEQUENCES = 2**17
USUAL_LENGTH = {"volta": 1024, "ampere": 2048, "hopper": 4096}
USUAL_VOCABULARY = 50304
# Tokens in a step.
USUAL_TOKENS = 2**21
# The number of GPUs if the row does not determine it.
UNKNOWN_GPUS = 256


def complete(cells: dict[str, str], gpu: Gpu) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the row with its empty cells filled, and the columns that were empty."""
    found = {column: spelled(column, cells.get(column, "")) for column in (*TEXTS, *MATTER, *NUMBERS, *MEASURED)}
    if (batch := value(found, "global_batch")) > MOST_SEQUENCES:
        found["global_batch"] = str(max(1, round(batch / (value(found, "seq_len") or _usual_length(gpu)))))
    gaps = tuple(column for column in MATTER if not found[column])
    for fill in (_shape, _axes, _batch, _sequence_parallel):
        for column, usual in fill(found, gpu).items():
            if not found.get(column):
                found[column] = str(usual)
    known = "dp" not in gaps and "gpus" in gaps
    return found, tuple(column for column in gaps if not (known and column == "gpus"))


def value(cells: dict[str, str], column: str) -> float:
    """Return a cell as a number, or 0 if it is empty."""
    return float(cells.get(column) or 0)


def _shape(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    name = cells["model"].lower()
    gated = int(cells.get("gated_mlp") == "1" if cells.get("gated_mlp") else re.search(GATED, name) is not None)
    preset = _preset(name)
    if preset is not None and value(cells, "hidden") in (0, preset.hidden):
        usual: dict[str, object] = {
            "layers": preset.layers, "hidden": preset.hidden, "vocab": preset.vocab_size, "gated_mlp": int(preset.gated),
            "ffn_hidden": preset.ffn if preset.moe is None else preset.moe.ffn,
        }  # fmt: skip
        if preset.moe is not None:
            usual |= {"moe_experts": preset.moe.experts, "moe_topk": preset.moe.top_k}
        heads, kv_heads = float(preset.heads), float(preset.kv_heads)
    else:
        layers, hidden = _depth_and_width(cells, name)
        heads = kv_heads = max(1, hidden // (128 if hidden >= 2048 else 64))
        ffn = _expert_width(cells, layers, hidden) or (256 * round(hidden * 8 / 3 / 256) if gated else 4 * hidden)
        usual = {"layers": layers, "hidden": hidden, "vocab": USUAL_VOCABULARY, "gated_mlp": gated, "ffn_hidden": ffn}
    heads, kv_heads = value(cells, "heads") or heads, value(cells, "kv_heads") or kv_heads
    # One of the two was guessed.
    if heads % kv_heads:
        heads = kv_heads = value(cells, "heads") or kv_heads
    return usual | {"heads": heads, "kv_heads": kv_heads}


def _preset(name: str) -> ModelSpec | None:
    meant = next((preset for preset in (*PRESETS, *ALIASES) if canonical(preset) == canonical(name)), None)
    return None if meant is None else resolve_model(meant)


def _expert_width(cells: dict[str, str], layers: float, hidden: float) -> int:
    """Return the width of experts from the parameters outside attention, or 0 if the row has no parameter count."""
    experts, parameters = value(cells, "moe_experts"), 1e9 * value(cells, "params_b")
    width = (parameters - 4 * layers * hidden**2) / max(1, layers * experts * 3 * hidden)
    return max(64, 64 * round(width / 64)) if experts and parameters else 0


def _depth_and_width(cells: dict[str, str], name: str) -> tuple[float, float]:
    """Return layers and hidden size from 12 x layers x hidden^2 parameters. If both are missing, hidden / layers is GPT-3's 128."""
    layers, hidden = value(cells, "layers"), value(cells, "hidden")
    spoken = re.search(r"(\d+(?:\.\d+)?)b\b", name)
    parameters = 1e9 * (value(cells, "params_b") or float(spoken[1] if spoken else 0))
    if layers and hidden:
        return layers, hidden
    if not parameters or value(cells, "moe_experts"):
        raise ValueError(f"neither layers and hidden nor a known model: {cells['model']!r}")
    if not hidden:
        hidden = sqrt(parameters / 12 / layers) if layers else (parameters * 128 / 12) ** (1 / 3)
        hidden = max(128, 128 * round(hidden / 128))
    embedding = (value(cells, "vocab") or USUAL_VOCABULARY) * hidden
    return layers or max(1, round((parameters - embedding) / 12 / hidden**2)), hidden


def _axes(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    """Return the missing parallel axes.

    The remaining GPUs go to tensor parallelism within a node, then to pipeline and context parallelism. Expert parallelism stays
    within a node.
    """
    per_node = value(cells, "gpus_per_node") or 8
    known = {axis: value(cells, axis) for axis in ("tp", "pp", "cp", "dp")}
    taken = 1.0
    for size in known.values():
        taken *= size or 1
    gpus = value(cells, "gpus") or (taken if known["dp"] else max(taken * (value(cells, "ep") or 1), UNKNOWN_GPUS))
    left = max(1.0, gpus // taken)
    dp, spare = (known["dp"], left) if known["dp"] else (left, 1.0)
    tp = known["tp"] or min(spare, per_node)
    spare = spare if known["tp"] else spare // tp
    pp, spare = (known["pp"], spare) if known["pp"] else (spare, 1.0)
    experts = min(value(cells, "moe_experts") or 1, per_node, dp)
    return {
        "gpus_per_node": per_node, "gpus": gpus, "tp": tp, "pp": pp, "cp": spare, "ep": experts, "dp": dp,
    }  # fmt: skip


def _batch(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    tokens = value(cells, "measured_step_s") * value(cells, "measured_tok_s_gpu") * value(cells, "gpus")
    length, batch, dp = value(cells, "seq_len"), value(cells, "global_batch"), value(cells, "dp")
    if not length:
        length = round(tokens / batch) if tokens and batch else _usual_length(gpu)
    once = dp * value(cells, "micro_batch") * value(cells, "pp")
    usual = once if once and value(cells, "gpus") <= value(cells, "gpus_per_node") else 0
    usual = usual or max(1, round(USUAL_TOKENS / length / dp)) * dp
    return {"seq_len": length, "global_batch": round(tokens / length) if tokens else usual}


def _usual_length(gpu: Gpu) -> int:
    return USUAL_LENGTH.get(gpu.architecture or "", 8192)


def _sequence_parallel(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    """Return whether sequence parallelism was usual: since Hopper, and with the selective recompute it was published with."""
    usual = gpu.architecture in ("hopper", "blackwell") or cells.get("recompute") == "selective"
    return {"sequence_parallel": int(usual)}

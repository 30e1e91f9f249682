"""What a published row leaves out, as far as the row itself settles it or one value was usual: the shape of a model with a known
name, the axis that is left when the others and the GPUs are known, the length or batch that step time and pace imply.

What has to fit on a card (micro-batch, sharding, recompute) is filled where memory is known, in planner_rows.py.
"""

from __future__ import annotations

import re

from argosy.config.resolve import resolve_model
from argosy.errors import ArgosyError
from argosy.plan.hardware import Gpu

MATTER = (
    "gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "gated_mlp", "vocab", "seq_len", "tp", "pp",
    "cp", "ep", "dp", "zero_stage", "sequence_parallel", "recompute", "micro_batch", "global_batch", "precision", "attn_impl",
)  # fmt: skip
GATED = "llama|qwen|mistral|mixtral|deepseek|dsv3|internlm|gpt-?oss|olmo|kimi"
USUAL_LENGTH = {"volta": 1024, "ampere": 2048, "hopper": 4096}
USUAL_TOKENS = 2**21  # of a step
UNKNOWN_GPUS = 256  # where nothing says how many there were


def complete(cells: dict[str, str], gpu: Gpu) -> tuple[dict[str, str], tuple[str, ...]]:
    """The row with numbers in its gaps, and the columns that had none."""
    found = {column: _spelled(column, (text or "").strip()) for column, text in cells.items()}
    gaps = tuple(column for column in MATTER if not found.get(column))
    for fill in (_shape, _axes, _batch, _sequence_parallel):
        for column, value in fill(found, gpu).items():
            if not found.get(column):
                found[column] = str(value)
    known = "dp" not in gaps and "gpus" in gaps
    return found, tuple(column for column in gaps if not (known and column == "gpus"))


def _spelled(column: str, text: str) -> str:
    """As planner_published.csv spells it."""
    low = text.lower()
    if column not in MATTER:
        return text
    if low in ("n/a", "na", "-", "?", "unknown"):
        return ""
    if column in ("gated_mlp", "sequence_parallel"):
        return {"true": "1", "yes": "1", "1.0": "1", "false": "0", "no": "0", "0.0": "0"}.get(low, text)
    if column == "recompute" and text:
        return "selective" if "sel" in low else "none" if low in ("none", "no", "0", "false", "off") else "full"
    return text


def value(cells: dict[str, str], column: str) -> float:
    """Zero where there is none."""
    return float(cells.get(column) or 0)


def _shape(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    name, hidden, kv_heads = cells["model"].lower(), value(cells, "hidden"), value(cells, "kv_heads")
    gated = int(cells.get("gated_mlp") == "1" if cells.get("gated_mlp") else re.search(GATED, name) is not None)
    try:
        preset = resolve_model(name)
    except ArgosyError:
        preset = None
    if preset is not None and hidden in (0, preset.hidden):
        return {
            "layers": preset.layers, "hidden": preset.hidden, "heads": preset.heads, "kv_heads": preset.kv_heads,
            "ffn_hidden": preset.ffn if preset.moe is None else preset.moe.ffn, "gated_mlp": int(preset.gated),
            "vocab": preset.vocab_size,
        }  # fmt: skip
    if not hidden or not value(cells, "layers"):
        raise ValueError(f"neither layers and hidden nor a known model: {cells['model']!r}")
    heads = value(cells, "heads") or max(1, hidden // (128 if hidden >= 2048 else 64))
    if kv_heads and heads % kv_heads:
        heads = kv_heads
    ffn = 256 * round(hidden * 8 / 3 / 256) if gated else 4 * hidden
    return {"heads": heads, "kv_heads": heads, "ffn_hidden": ffn, "gated_mlp": gated, "vocab": 50304}


def _axes(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    """What is left of the GPUs goes to tensor parallelism within a node, then to the pipeline, then to the context; experts
    are spread within a node."""
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
        length = round(tokens / batch) if tokens and batch else USUAL_LENGTH.get(gpu.architecture or "", 8192)
    usual = max(1, round(USUAL_TOKENS / length / dp)) * dp
    return {"seq_len": length, "global_batch": round(tokens / length) if tokens else usual}


def _sequence_parallel(cells: dict[str, str], gpu: Gpu) -> dict[str, object]:
    """Usual from Hopper on, and with the selective recompute it was published with."""
    usual = gpu.architecture in ("hopper", "blackwell") or cells.get("recompute") == "selective"
    return {"sequence_parallel": int(usual)}

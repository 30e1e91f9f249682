"""Normalisation of a published row's cells: numbers with units, flags and ZeRO stages in words, model names in many forms.

A cell that cannot be parsed counts as empty.
"""

from __future__ import annotations

import re

NOTHING = ("", "n/a", "na", "nan", "none", "null", "-", "?", "unknown", "auto")
NO = ("no", "0", "0.0", "false", "off")
FLAGS = ("gated_mlp", "sequence_parallel")
WORDS = ("recompute", "precision", "attn_impl")
TEXTS = ("id", "source", "gpu", "internode", "model", "flops_convention", "notes")
MEASURED = (
    "measured_step_s", "measured_tok_s_gpu", "measured_tflops_gpu", "measured_mfu", "measured_mem_gb", "params_b",
)  # fmt: skip
# Words for ZeRO stage 3.
SHARDED = r"fsdp|full|hsdp"
COUNTED = {"k": 1000, "m": 1e6}
BINARY = {"k": 1024, "m": 1024**2}
# Unit suffixes by column. A batch in thousands or millions is in tokens.
UNITS = {
    "seq_len": BINARY,
    "global_batch": BINARY,
    "vocab": COUNTED,
    "params_b": {"m": 1e-3, "t": 1000},
    "measured_step_s": {"ms": 1e-3, "min": 60},
    "measured_tok_s_gpu": COUNTED,
    "measured_tflops_gpu": {"pflop": 1000, "pflops": 1000},
    "measured_mem_gb": {"mib": 1 / 1024, "mb": 1 / 1024},
}
# The largest plausible number in any column.
MOST = 1e12


def spelled(column: str, text: str) -> str:
    """Return a cell in the spelling of published.csv."""
    low = text.lower()
    if column in TEXTS:
        return text
    if column == "recompute" and low:
        return "selective" if "sel" in low else "none" if low in (*NOTHING, *NO) else "full"
    if column == "zero_stage" and low in ("none", "ddp", *NO):
        return "0"
    if low in NOTHING:
        return ""
    if column in FLAGS:
        return "0" if low in NO else "1" if low in ("true", "yes", "1", "1.0", "on") else text
    if column in WORDS:
        return text
    if column == "zero_stage" and re.search(SHARDED, low):
        return "3"
    return _number(column, low)


def _number(column: str, text: str) -> str:
    """Parse the first number of a cell: 8, 8.0, 1,024, ~2, 64GB, 1e3, 8K, 350 ms, 16x8 GPUs. Only a ZeRO stage may be 0."""
    match = re.search(r"(\d+\.?\d*(?:e[+-]?\d+)?)(?: ?([a-z]+))?", text.replace(",", ""))
    if match is None or "-" in text[:1]:
        return ""
    number = float(match[1]) * UNITS.get(column, {}).get(match[2] or "", 1)
    if column == "gpus" and (nodes := re.match(r"(\d+) ?[x*] ?(\d+)\b", text)):
        number = float(nodes[1]) * float(nodes[2])
    if column not in MEASURED:
        number = round(number)
    return f"{number:.15g}" if 0 < number < MOST or column == "zero_stage" else ""


def canonical(name: str) -> str:
    """Return the part of a model's name that identifies its shape: `Meta-Llama-3.1-8B` and `llama3-8b` are the same."""
    low = name.lower().strip().rpartition("/")[2]
    low = re.sub(r"[ _-]", "", re.sub(r"^meta-|-(instruct|base|hf|it|chat)$", "", low))
    return re.sub(r"^llama3\.\d", "llama3", low)

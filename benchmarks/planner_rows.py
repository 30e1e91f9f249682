"""Published measurements as work, layout, cluster and stack: every row of a CSV, with defaults where cells are empty.

What a row does not say is filled from what its source is known to do (Megatron's data-parallel width from the GPUs, a
micro-batch of one), and the filled cells are counted, so that nothing is left out silently.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from argosy.config.model import ModelSpec
from argosy.config.presets import FAMILIES
from argosy.plan.calibration import calibration
from argosy.plan.hardware import Cluster, Gpu, find_gpu
from argosy.plan.layout import Layout, Work
from argosy.plan.memory import memory_of

HEAD_DIMS = {"qwen3": 128, "gpt-oss": 64, "gptoss": 64, "nemotron-340b": 192, "deepseek": 128, "dsv3": 128, "kimi": 128}
UNKNOWN_GPUS = 256  # where a source does not say how many there were


@dataclass(frozen=True)
class Row:
    """One published measurement. `memory_kind` says which memory was measured."""

    id: str
    source: str
    work: Work
    layout: Layout
    cluster: Cluster
    stack: str
    step_s: float | None
    memory: float | None
    memory_kind: str
    out_of_memory: bool
    filled: tuple[str, ...]  # columns that were empty and got a default

    @property
    def dense(self) -> bool:
        return self.work.model.moe is None

    @property
    def sixteen_bit(self) -> bool:
        return self.work.precision == "bf16"


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows, and for each that cannot be one, its id and why."""
    rows, refused = [], []
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            try:
                rows.append(_row(cells))
            except (ValueError, KeyError, ZeroDivisionError) as error:
                refused.append((cells.get("id") or "?", str(error).splitlines()[0]))
    return rows, refused


def _row(cells: dict[str, str]) -> Row:
    filled: list[str] = []

    def number(column: str, default: float) -> int:
        text = (cells.get(column) or "").strip()
        if not text:
            filled.append(column)
        return int(float(text or default))

    source = re.sub(r"-\d+$", "", cells["id"])
    notes = cells.get("notes", "").lower()
    tp, pp, cp, ep = (number(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    per_node = number("gpus_per_node", 8)
    gpus = number("gpus", 0) or max(tp * pp * cp * ep, UNKNOWN_GPUS)
    dp = number("dp", 0) or max(1, gpus // (tp * pp * cp))
    gpu = _gpu(cells)
    work = _work(cells, number)
    micro_batch = number("micro_batch", 0) or _usual_micro_batch(work, dp, pp, source)
    layout = Layout(
        tp=tp, pp=pp, vpp=int(cells.get("vpp") or 1), cp=cp, ep=ep, dp=dp, zero=number("zero_stage", 1),
        sp=(cells.get("sequence_parallel") or "0") == "1" and tp > 1, micro_batch=micro_batch,
        recompute=cells.get("recompute") or "none",  # type: ignore[arg-type]
    )  # fmt: skip
    stack = _stack(source, notes, cells)
    if not cells.get("recompute"):
        filled.append("recompute")
        layout = _least_recompute(work, layout, gpu, stack)
    step = cells.get("measured_step_s") or ""
    rate = cells.get("measured_tok_s_gpu") or ""
    step_s = float(step) if step else work.tokens / (float(rate) * gpus) if rate else None
    kind = "reserved" if "max_reserved" in notes else "device" if "nvidia-smi" in notes else "allocated"
    return Row(
        cells["id"], source, work, layout, _cluster(cells, gpu, gpus, per_node), stack, step_s,
        float(cells["measured_mem_gb"]) if cells.get("measured_mem_gb") else None, kind,
        "OOM" in (cells.get("flops_convention") or ""), tuple(filled),
    )  # fmt: skip


def _work(cells: dict[str, str], number: Any) -> Work:
    gated, experts = cells.get("gated_mlp") == "1", number("moe_experts", 0) if cells.get("moe_experts") else 0
    name = cells["model"].lower()
    family = "mpt" if name.startswith("mpt") else "llama" if gated or experts else "gpt"
    hidden, ffn, seq_len = number("hidden", 0), number("ffn_hidden", 0), number("seq_len", 4096)
    shape: dict[str, Any] = {
        **FAMILIES[family], "family": family, "layers": number("layers", 0), "hidden": hidden,
        "heads": number("heads", 0), "kv_heads": number("kv_heads", number("heads", 0)), "ffn": ffn or 4 * hidden,
        "vocab_size": number("vocab", 50304), "max_seq_len": seq_len,
    }  # fmt: skip
    head_dim = next((size for part, size in HEAD_DIMS.items() if part in name), None)
    if head_dim is not None:
        shape["head_dim"] = head_dim
    if "untie" in (cells.get("notes") or ""):
        shape["tied"] = False
    if not gated and not experts and family == "gpt" and not cells["id"].startswith("argosy"):
        shape["dropout"] = 0.1
    if experts:
        shape |= {"moe": {"experts": experts, "top_k": number("moe_topk", 1), "ffn": ffn}, "mlp_bias": False}
        shape["activation"] = "swiglu" if gated else "gelu"
    precision = {"fp16": "bf16", "bf16": "bf16", "nvfp4": "fp4"}.get(cells["precision"], "fp8")
    return Work(ModelSpec.model_validate(shape), seq_len, number("global_batch", 1), precision)


def _gpu(cells: dict[str, str]) -> Gpu:
    name = re.sub(r"\(.*", "", cells["gpu"])
    name = re.sub(r"-SXM\d?$", "", name)
    memory = float(cells.get("gpu_mem_gb") or 80)
    if name.startswith("H100-96"):
        name = "H100-96"
    if name in ("A100", "V100"):
        name += "-40" if memory <= 40 and name == "A100" else "-80" if name == "A100" else "-32"
    return find_gpu(name)


def _cluster(cells: dict[str, str], gpu: Gpu, gpus: int, per_node: int) -> Cluster:
    """The link between nodes as the row states it, in GB/s of one GPU; 25 GB/s (HDR) or 50 (NDR) where it does not."""
    text = cells.get("internode") or ""
    each = 25.0 if gpu.name.startswith(("A100", "V100")) else 50.0
    if match := re.search(r"(\d+) ?Gbps/node", text.replace("Gb/s", "Gbps")):
        each = float(match[1]) / 8 / per_node
    if match := re.search(r"(\d+)x(\d+) ?Gbps", text):
        each = int(match[1]) * float(match[2]) / 8 / per_node
    if match := re.search(r"(\d+) ?Gb(?:ps|/s).*per GPU", text):
        each = float(match[1]) / 8
    domain = 72 if "NVL" in text or "NVLink domain" in text or gpu.name.startswith("GB") else per_node
    return Cluster(cells["gpu"], gpu, gpus, per_node, each, min(domain, max(gpus, 1)))


def _stack(source: str, notes: str, cells: dict[str, str]) -> str:
    if source in ("foundry", "argosy"):
        return source
    if "deterministic-mode" in notes:
        return "megatron-ci"
    if source == "titan":
        if "H200" in cells["gpu"]:
            return "fsdp-2025"
        return "fsdp" if "eager" in notes or "A100" in cells["gpu"] else "fsdp-compiled"
    if source in ("sc21", "mlm-jan21", "mlm-2020", "korth", "vtrain", "vtrain1n") or "unfused" in cells["attn_impl"]:
        return "megatron-2021"
    if source == "paper" and "A100" in cells["gpu"] and "MegaScale" not in cells["source"]:
        return "megatron-2021"
    return "megatron"


def _least_recompute(work: Work, layout: Layout, gpu: Gpu, stack: str) -> Layout:
    """A run that was published did fit: the least recompute with which it does, where the source does not say."""
    known = calibration()
    for how in ("none", "selective", "full"):
        layout = replace(layout, recompute=how)
        if max(stage.device for stage in memory_of(work, layout, known.stacks[stack], known)) <= gpu.memory:
            return layout
    return layout


def _usual_micro_batch(work: Work, dp: int, pp: int, source: str) -> int:
    share = max(1, work.global_batch // dp)
    if source == "titan":  # as many micro-batches as stages
        return max(1, share // pp)
    most = 16 if source == "mlm-jan21" and share >= 16 and work.sizes.hidden < 6000 else 1
    return next(size for size in range(min(most, share), 0, -1) if share % size == 0)

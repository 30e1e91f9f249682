"""The step time of a published row: stated in seconds, or derived from tokens/s, FLOP/s or MFU.

FLOP/s and MFU are counted in several ways. A row's `flops_convention` says how: attention in full (usual) or its causal half,
whether recomputation counts (HFU), and whether MFU is relative to an fp8 peak.
"""

from __future__ import annotations

import re

from benchmarks.planner.gaps import value

from argosy.plan.hardware import Gpu
from argosy.plan.layouts import Work

HALVED = r"(?<!not )(?<!not causal-)halved|causal half|causal only"
REMADE = "hfu|hardware|with recompute|4 passes"


def step_seconds(cells: dict[str, str], work: Work, gpu: Gpu, gpus: int) -> float | None:
    if step := value(cells, "measured_step_s"):
        return step
    if rate := value(cells, "measured_tok_s_gpu"):
        return work.tokens / (rate * gpus)
    reached = 1e12 * value(cells, "measured_tflops_gpu")
    if not reached and (share := value(cells, "measured_mfu")):
        narrow = "fp8" in cells["flops_convention"].lower()
        reached = (share / 100 if share > 1 else share) * 1e12 * gpu.peak(work.precision if narrow else "bf16")
    return _counted(cells, work) / (reached * gpus) if reached else None


def _counted(cells: dict[str, str], work: Work) -> float:
    """Return the FLOPs of a step as the source counts them."""
    said, model, sizes = cells["flops_convention"].lower(), work.model, work.sizes
    routed = 0.0 if model.moe is None else sizes.expert_layers * model.moe.top_k * sizes.expert
    matmul = sizes.layers * (sizes.attention + sizes.hidden * sizes.latent + sizes.mlp + routed)
    reach = min(work.seq_len, model.window or work.seq_len)
    keys = reach - reach**2 / (2 * work.seq_len) if re.search(HALVED, said) else reach
    flops = 6 * (matmul + sizes.predicted * sizes.head) + 12 * sizes.layers * sizes.query * keys
    again = 4 / 3 if re.search(REMADE, said) and cells["recompute"] in ("", "full") else 1.0
    return work.tokens * flops * again

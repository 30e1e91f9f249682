"""Published measurements: every row of a CSV as work, layout, cluster and stack, with defaults for empty cells.

Empty cells are filled from what the source usually does (Megatron's data-parallel size from the GPUs, a micro-batch of one). The
filled cells are counted and reported.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path

from benchmarks.planner.gaps import complete, value
from benchmarks.planner.machines import cluster_of, gpu_of
from benchmarks.planner.measured import step_seconds
from benchmarks.planner.models import work_of
from pydantic import ValidationError

from argosy.errors import ArgosyError
from argosy.plan.calibration import Stack, calibration
from argosy.plan.hardware import Cluster, Gpu
from argosy.plan.layouts import Layout, Recompute, Schedule, Work
from argosy.plan.memory import memory_of
from argosy.plan.time import step_time

# Frameworks made of torch's own modules, with fused attention kernels for Ampere.
PLAIN = "nano-?tron|nanogpt|picotron|internlm|olmo|colossal|litgpt|tinyllama|metaseq|lightning|hugging|torchtune"
# Releases in which NVIDIA's MoE recipes run whole steps as CUDA graphs, fuse experts' MLPs and overlap the all-to-all.
LATER_RECIPES = r"\b(26\.(0[5-9]|1\d)|(2[7-9]|3\d)\.\d\d)"
LONG = 4096  # tokens
# The largest micro-batch to assume if a source does not state it.
MOST_SEQUENCES = 16


@dataclass(frozen=True)
class Row:
    """One published measurement.

    `recomputed` is the share of the layers to which `layout.recompute` applies; the others keep all activations. `memory_kind` is
    the kind of memory that was measured. `filled` are the columns that were empty and got a default.
    """

    id: str
    source: str
    work: Work
    layout: Layout
    cluster: Cluster
    stack: Stack
    recomputed: float
    step_s: float | None
    memory: float | None
    memory_kind: str
    out_of_memory: bool
    filled: tuple[str, ...]

    @property
    def dense(self) -> bool:
        return self.work.model.moe is None

    @property
    def sixteen_bit(self) -> bool:
        return self.work.precision == "bf16"


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows of a file, and (id, reason) for each row that cannot be read."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return rows_of(csv.DictReader(file))


def rows_of(published: Iterable[dict[str, str]]) -> tuple[list[Row], list[tuple[str, str]]]:
    rows, refused = [], []
    for number, spelled in enumerate(published, 1):
        cells = {str(column).strip().lower(): str(text or "").strip() for column, text in spelled.items()}
        name = cells.get("id") or f"row-{number}"
        try:
            row = _row({**cells, "id": name})
            seconds = step_time(row.work, row.layout, row.cluster, row.stack, calibration()).total
            if not 0 < seconds < inf:
                raise ValueError(f"a step of {seconds} s")
            rows.append(row)
        except ArgosyError as error:
            refused.append((name, error.cause))
        except ValidationError as error:
            refused.append((name, error.errors()[0]["msg"]))
        except (ValueError, ArithmeticError) as error:
            refused.append((name, str(error).splitlines()[0]))
    return rows, refused


def _row(published: dict[str, str]) -> Row:
    gpu = gpu_of(published)
    cells, filled = complete(published, gpu)
    work = work_of(cells)
    stack = _stack(cells, gpu)
    gpus, per_node = int(value(cells, "gpus")), int(value(cells, "gpus_per_node"))
    cluster = cluster_of(cells, gpu, gpus, per_node)
    layout, recomputed = _layout(cells, filled, work, stack, cluster)
    step = step_seconds(cells, work, gpu, gpus)
    if "gpus" in filled and step:
        layout = _as_slow(layout, step, work, stack, cluster)
        cluster = cluster_of(cells, gpu, layout.gpus, per_node)
    notes = cells["notes"].lower()
    return Row(
        id=cells["id"],
        source=re.sub(r"-\d+$", "", cells["id"]),
        work=work,
        layout=layout,
        cluster=cluster,
        stack=stack,
        recomputed=recomputed,
        step_s=step,
        memory=value(cells, "measured_mem_gb") or None,
        memory_kind="reserved" if "max_reserved" in notes else "device" if "nvidia-smi" in notes else "allocated",
        out_of_memory="OOM" in cells["flops_convention"],
        filled=filled,
    )


def _layout(
    cells: dict[str, str], filled: tuple[str, ...], work: Work, stack: Stack, cluster: Cluster
) -> tuple[Layout, float]:
    """Return the layout, and the share of the layers that is recomputed."""
    notes = cells["notes"].lower()
    tp, pp, cp, ep, dp, vpp = (int(value(cells, column)) for column in ("tp", "pp", "cp", "ep", "dp", "vpp"))
    if pp > work.sizes.layers:
        raise ValueError(f"pp {pp} is more than {work.sizes.layers} layers")
    layout = Layout(
        tp=tp, pp=pp, vpp=vpp or (2 if re.search("interleaved|dualpipe|zbv", notes) and pp > 1 else 1), cp=cp, ep=ep, dp=dp,
        etp=_expert_tp(cells, work, tp),
        zero=int(value(cells, "zero_stage")) if cells["zero_stage"] else 1,
        sp=cells["sequence_parallel"] == "1" and tp > 1, micro_batch=int(value(cells, "micro_batch")) or 1,
        recompute=cells["recompute"] or "full",  # type: ignore[arg-type]
        schedule=_schedule(notes) if pp > 1 else None,
    )  # fmt: skip
    gpu = cluster.gpu
    # A published run did fit.
    if "zero_stage" in filled and not _fits(work, layout, stack, gpu):
        layout = replace(layout, zero=3)
    if "micro_batch" in filled:
        layout = replace(
            layout, micro_batch=_usual_micro_batch(work, layout, stack, cluster, free="recompute" in filled)
        )
    return layout, _least_recomputed(work, layout, gpu, stack) if "recompute" in filled else 1.0


def _as_slow(layout: Layout, step: float, work: Work, stack: Stack, cluster: Cluster) -> Layout:
    """Return the layout with the data-parallel size whose predicted step time is nearest to the measured one.

    It is used if the number of GPUs is unknown.
    """
    widths = [
        2**n
        for n in range(13)
        if work.global_batch % 2**n == 0 and 2**n * layout.cp * layout.tp % (layout.ep * layout.expert_tp) == 0
    ]

    def apart(dp: int) -> float:
        there = replace(layout, dp=dp)
        nodes = replace(cluster, gpus=there.gpus)
        return abs(log(step_time(work, there, nodes, stack, calibration()).total / step))

    return replace(layout, dp=min(widths, key=apart)) if widths else layout


def _schedule(notes: str) -> Schedule | None:
    if "dualpipe" in notes:
        return "dualpipev"
    return "zbv" if re.search(r"zero[ -]?bubble|\bzb[vh]", notes) else None


def _expert_tp(cells: dict[str, str], work: Work, tp: int) -> int:
    """Return the tensor parallelism of experts. Megatron's default is `tp` (0 here); NeMo's recipes set 1."""
    if work.model.moe is None:
        return 0
    said = f"{cells.get('notes') or ''} {cells['model']}"
    if found := re.search(r"expert-tensor-parallel-size=(\d+)|etp[ =]?(\d+)", said):
        return min(tp, int(found[1] or found[2]))
    return 1 if re.search("bridge|nemo", cells["source"].lower()) else 0


def _stack(cells: dict[str, str], gpu: Gpu) -> Stack:
    """Return the stack of a row, from its framework, its attention, and what it overlaps or fuses."""
    stacks = calibration().stacks
    said = " ".join((cells["id"], cells["source"], cells.get("notes") or "")).lower()
    attention = _attention(cells, gpu)
    if "argosy" in said:
        name = "argosy"
    elif "foundry" in said or "mosaic" in said:
        name = "foundry"
    elif "titan" in said or _is_torch_sharded(cells, said):
        name = "fsdp-compiled" if re.search("compile|float8|olmo", said) else "fsdp"
        if name == "fsdp-compiled" and re.search("_?202[5-9]", cells["source"]):
            name = "fsdp-2025"
    elif "deterministic-mode" in said:
        name = "megatron-deterministic"
    elif re.search("deepspeed|bigsci|mt-nlg|neox", said):
        name = "megatron-deepspeed"
    elif re.search(PLAIN, said):
        name = "fsdp" if cells.get("zero_stage") == "3" else "torch"
    elif attention == "unfused" and "transformer" not in (cells.get("attn_impl") or "").lower():
        early = re.search("2020|2021|sc21|jan21|2104", said) or gpu.architecture == "volta"
        name = "megatron-2021" if early else "megatron-2022"
    else:
        name = "megatron" if re.search("megatron|nemo|mcore|megascale", said) or attention == "native" else "torch"
        if re.search(r"\bnemo\b|megatron-bridge", said):
            name = "nemo-2026" if re.search(LATER_RECIPES, said) and value(cells, "moe_experts") else "nemo"
    stack = stacks[name]
    if name == "megatron-deepspeed" and "bf" in (cells.get("precision") or "").lower():
        # It accumulates bf16 gradients in separate fp32 buffers.
        wide = {"accumulated": 10, "reduced": 4, "gradient": 6, "gradient_once": 6, "widened": 0}
        stack = stack.model_copy(update=wide)
    if name == "torch" and "compile" in said:
        whole = stacks["fsdp-2025"]
        stack = stack.model_copy(update={"fused": True, "logit": whole.logit, "loss": whole.loss})
    if "one by one" in said:
        stack = stack.model_copy(update={"replays": False})
    # Not the source's name: a source may have rows with and without overlap.
    own = f"{cells.get('notes') or ''} {cells['model']}".lower()
    overlaps = {*stack.overlaps, *(["tensor"] if "asynctp" in own else [])}
    overlaps |= {"experts"} if re.search("dualpipe|a2a[-_ ]?(overlap|ovlp)|overlap[-_ ]moe", own) else set()
    return stack.model_copy(update={"attention": attention, "overlaps": tuple(sorted(overlaps))})


def _is_torch_sharded(cells: dict[str, str], said: str) -> bool:
    others = "megatron" if "fsdp2" in said else "megatron|nemo"
    return (cells.get("zero_stage") == "3" or "fsdp2" in said) and not re.search(others, said)


def _attention(cells: dict[str, str], gpu: Gpu) -> str:
    """Return the kind of attention kernels.

    If a row does not state it: Ampere and earlier had no fused attention until sequence parallelism, sharded weights or long
    sequences were usual.
    """
    chosen = re.search(r"attention-backend=(\w+)", cells.get("notes") or "")
    said = (chosen[1] if chosen else cells.get("attn_impl") or "").lower()
    # Transformer Engine chooses the kernel for the GPU.
    if chosen and said == "flash" and gpu.architecture in ("hopper", "blackwell"):
        return "native"
    if re.search("unfused|softmax|local|eager", said):
        return "unfused"
    if re.search(r"\bte\b|transformer|cudnn|flash[ -]?(attn|attention)?[ -]?v?3|\bfa-?3", said):
        return "native"
    if re.search(r"flash|xformers|memory[ -]efficient|sdpa|\bfa-?2?\b", said):
        return "flash"
    if re.search(PLAIN, f"{cells['id']} {cells['source']}".lower()):
        return "flash"
    if gpu.architecture not in ("volta", "ampere"):
        return "native"
    later = cells["sequence_parallel"] == "1" or cells.get("zero_stage") == "3" or value(cells, "seq_len") > LONG
    later = later or "nemo" in cells["source"].lower()
    return "flash" if later else "unfused"


def _need(work: Work, layout: Layout, stack: Stack) -> float:
    return max(stage.device for stage in memory_of(work, layout, stack, calibration()))


def _least_recomputed(work: Work, layout: Layout, gpu: Gpu, stack: Stack) -> float:
    """Return the share of layers that must be recomputed to fit, the default if a source does not state it."""
    none, full = (_need(work, replace(layout, recompute=how), stack) for how in ("none", "full"))  # type: ignore[arg-type]
    return min(1.0, max(0.0, (none - gpu.memory) / max(1e-9, none - full)))


def _fits(work: Work, layout: Layout, stack: Stack, gpu: Gpu) -> bool:
    return _need(work, layout, stack) <= gpu.memory


def _usual_micro_batch(work: Work, layout: Layout, stack: Stack, cluster: Cluster, *, free: bool) -> int:
    """Return the micro-batch to assume: as many sequences as fit.

    If recompute is `free` to choose, layouts without recompute are tried first. In a pipeline it is the smallest micro-batch that is
    about as fast as the best; with FSDP, which gathers weights for every micro-batch, there are as many micro-batches as stages.
    """
    share = max(1, work.global_batch // layout.dp)
    if layout.pp > 1 and stack.name.startswith("fsdp"):
        return max(1, share // layout.pp)
    ways: list[Recompute] = ["none", layout.recompute] if free else [layout.recompute]
    sizes = [size for size in range(min(share, MOST_SEQUENCES), 0, -1) if share % size == 0]
    for way in ways:
        tried = [replace(layout, micro_batch=size, recompute=way) for size in sizes]
        if fitting := [one for one in tried if _fits(work, one, stack, cluster.gpu)]:
            return fitting[0].micro_batch if layout.pp == 1 else _least_as_fast(work, fitting[::-1], stack, cluster)
    return 1


def _least_as_fast(work: Work, layouts: list[Layout], stack: Stack, cluster: Cluster) -> int:
    """Return the smallest micro-batch whose step time is within 10% of the fastest."""
    times = [step_time(work, layout, cluster, stack, calibration()).total for layout in layouts]
    return next(layout.micro_batch for layout, time in zip(layouts, times, strict=True) if time <= 1.1 * min(times))

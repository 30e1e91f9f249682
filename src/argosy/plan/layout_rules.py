"""The rules that a layout has to follow to run. The search, the commands and the benchmarks share them."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.pipeline import can_interleave
from argosy.families.architecture import architecture_of
from argosy.plan.layouts import Layout, Work


def violations(work: Work, layout: Layout, gpus: int) -> Iterator[str]:
    """Yield the reasons why this layout cannot run, with the numbers; nothing if it can."""
    model = work.model
    if layout.gpus != gpus:
        yield f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} = {layout.gpus}, not {gpus} GPUs"
    for what, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if size % layout.tp and not (what == "kv_heads" and layout.tp % size == 0):
            yield f"{what} {size} is not divisible by tp {layout.tp}"
    if layout.pp * layout.vpp > work.sizes.layers:
        yield f"pp {layout.pp} x vpp {layout.vpp} is more than {work.sizes.layers} layers"
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp {layout.vpp} needs pipeline parallelism, and pp is 1"
    if layout.schedule is not None and layout.pp == 1:
        yield f"{layout.schedule} needs pipeline parallelism, and pp is 1"
    if layout.pp > 1 and model.retrieval is not None:
        yield f"pp {layout.pp}: a two-tower model cannot be split into pipeline stages"
    if layout.pp > 1 and layout.is_v_shaped and layout.vpp != 2:
        yield f"{layout.schedule} has two stages on each rank, not {layout.vpp}"
    if layout.schedule == "dualpipev" and work.micro_batches(layout) < 2 * layout.pp:
        yield f"{work.micro_batches(layout)} micro-batches are fewer than 2 x pp {layout.pp}, as dualpipev needs"
    if layout.cp > 1 and architecture_of(model).uncuttable is not None:
        yield f"cp {layout.cp}: context parallelism supports decoders only"
    if work.seq_len % (layout.cp * (2 if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)):
        yield f"seq_len {work.seq_len} is not divisible by cp {layout.cp}" + (f" x tp {layout.tp}" if layout.sp else "")
    if (unaligned := work.fp8_refusal(layout)) is not None:
        yield unaligned[0]
    if work.divided_batch % (layout.dp * layout.micro_batch):
        ramped = "" if work.divided_batch == work.global_batch else f", or its ramp-up by {work.ramp_divisor},"
        yield (
            f"global_batch {work.global_batch}{ramped} is not divisible by dp {layout.dp} x micro_batch {layout.micro_batch}"
        )
    elif layout.vpp > 1 and not layout.is_v_shaped and not can_interleave(work.micro_batches(layout), layout.pp):
        yield f"{work.micro_batches(layout)} micro-batches cannot be interleaved in equal rounds of pp {layout.pp} or more"
    if layout.ep > 1 and (model.moe is None or model.moe.experts % layout.ep):
        yield f"ep {layout.ep} does not divide {0 if model.moe is None else model.moe.experts} experts"
    if layout.dp % layout.copies:
        yield f"dp {layout.dp} is not divisible by {layout.copies} copies"
    elif layout.shards % layout.ep:
        yield f"ep {layout.ep} does not divide the {layout.shards} ranks of a copy"

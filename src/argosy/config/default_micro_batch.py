"""The micro-batch of a run that leaves it open, from the spec alone. On a GPU that the planner knows, the planner replaces it."""

from __future__ import annotations

from argosy.config.batches import divisors
from argosy.config.fp8_rules import FP8_ALIGNMENT, check_fp8_tokens
from argosy.config.layout import check_layout
from argosy.config.origins import Origins
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of

# The most tokens that `parallel: auto` puts into one micro-batch.
AUTO_MICRO_BATCH_TOKENS = 16_384
# The origins of the size: one that the run uses, and one that the planner replaces when the run starts on a GPU.
FINAL = "derived: parallel: auto"
UNTIL_START = f"{FINAL}; on a GPU chosen at the start"


def is_micro_batch_open(origins: Origins) -> bool:
    """Return whether a spec leaves its micro-batch open, so that its size is a default."""
    return origins.get("parallel.micro_batch") in (FINAL, UNTIL_START)


def with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"micro_batch": size})})


def default_micro_batch(spec: RunSpec) -> int:
    """Return the largest divisor of a rank's share of the batch with at most AUTO_MICRO_BATCH_TOKENS tokens.

    If the pipeline schedule or fp8 matmuls cannot have that one, the result is the next smaller one that they can have, or else the
    next larger one. If they can have none, the checks of the spec refuse the result.
    """
    share = max(1, spec.train.batches.divisor // spec.parallel.data_parallel)
    most = max(1, AUTO_MICRO_BATCH_TOKENS // spec.data.seq_len)
    # Of long samples, fp8 matmuls may need more at once.
    larger = [size for size in divisors(share, FP8_ALIGNMENT) if size > most]
    sizes = [*reversed(divisors(share, most)), *larger]
    if spec.train.precision != "fp8" and spec.parallel.pp == 1:
        return sizes[0]
    return next((size for size in sizes if _runs(with_micro_batch(spec, size))), sizes[0])


def _runs(spec: RunSpec) -> bool:
    try:
        check_layout(spec, {})
        check_fp8_tokens(spec, {})
    except ArgosyError:
        return False
    return True


def origin_of_default(spec: RunSpec) -> str:
    """Return the origin of a micro-batch that the spec leaves open."""
    return UNTIL_START if planner_chooses(spec) and spec.train.device != "cpu" else FINAL


def planner_chooses(spec: RunSpec) -> bool:
    """Return whether the planner chooses an open micro-batch for a layout that is settled.

    Predicted memory was compared with measurements for decoders only, and a retriever's micro-batch is part of its task.
    """
    return architecture_of(spec.model).causal

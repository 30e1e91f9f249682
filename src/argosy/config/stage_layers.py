"""The split of a model into pipeline stages: the layers of each stage, the rank that holds it, and the pipeline bubble.

The split minimises the FLOPs of the slowest stage, with the output head counted in the last one. It needs no torch, so that plans
and refusals can be made on any machine.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from argosy.config.counts import layer_flops
from argosy.config.model import ModelSpec
from argosy.config.schema import ParallelSpec
from argosy.families.architecture import architecture_of

# Schedules with two stages per rank, down the ranks and up again. The first rank holds both ends of the model.
V_SHAPED = ("zbv", "dualpipev")
# Schedules that need more than one stage per rank.
SEVERAL_STAGES = ("interleaved-1f1b", *V_SHAPED)


def count_layers(model: ModelSpec) -> int:
    """Return the number of layers of all stacks."""
    return sum(architecture_of(model).stacks(model))


def rank_of_stage(schedule: str | None, ranks: int, stage: int) -> int:
    place = stage % ranks
    return ranks - 1 - place if schedule in V_SHAPED and stage >= ranks else place


def split_layers(model: ModelSpec, stages: int, seq_len: int) -> list[range]:
    """Return the layer numbers of each stage. Numbers of an encoder-decoder run through both stacks."""
    layers, head = layer_flops(model, seq_len)
    return split_costs([*layers[:-1], layers[-1] + head], stages)


def split_costs(costs: list[float], parts: int) -> list[range]:
    """Split costs into consecutive non-empty parts. Minimise the largest part, then the sum of squares of the parts."""
    sums = [0.0, *accumulate(costs)]
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [(inf, inf, 0)] * len(costs)]
    for part in range(1, parts + 1):
        row = [(inf, inf, 0)] * (len(costs) + 1)
        for end in range(part, len(costs) + 1):
            for start in range(end - 1, part - 2, -1):
                most, squares, _ = best[-1][start]
                cost = sums[end] - sums[start]
                # The part only grows from here on.
                if cost > row[end][0]:
                    break
                row[end] = min(row[end], (max(most, cost), squares + cost * cost, start))
        best.append(row)
    ranges: list[range] = []
    end = len(costs)
    for row in reversed(best[1:]):
        ranges.insert(0, range(row[end][2], end))
        end = row[end][2]
    return ranges


def bubble(parallel: ParallelSpec, micros: int) -> tuple[float, str]:
    """Return the pipeline bubble (the share of a step in which a rank is idle) and its arithmetic, for equally long stages.

    Time is counted in passes of one micro-batch through one stage. A pass is forward and backward together; if the schedule splits the
    backward pass in two, each of the three parts is one pass.
    """
    ranks, pieces = parallel.pp, parallel.vpp
    if parallel.schedule in V_SHAPED:
        idle, work, of = ranks - 1, 3 * pieces * micros, f"3 x {pieces} x {micros}"
        if parallel.schedule == "zbv":
            idle = max(idle, 2 * (2 * ranks - 1 - micros))
    else:
        idle, work = ranks - 1 + (pieces - 1) * max(0, ranks - micros), pieces * micros
        of = f"{pieces} x {micros}" if pieces > 1 else str(micros)
    return idle / (work + idle), f"{idle} / ({of} + {idle})"

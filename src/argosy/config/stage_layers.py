"""How a pipeline cuts a model: which layers make a stage, which rank holds it, and how long ranks stand idle.

Stages are cut so that the slowest is as fast as can be, by FLOPs, the output head counted with the last one. Needs no torch,
so that a plan and a refusal can be made on any machine.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from argosy.config.counts import layer_flops
from argosy.config.model import ModelSpec
from argosy.config.schema import ParallelSpec
from argosy.families.architecture import architecture_of

V_SHAPED = ("zbv", "dualpipev")  # two stages a rank, down the ranks and up again: the first has both ends of the model
SEVERAL_STAGES = ("interleaved-1f1b", *V_SHAPED)  # that need more than one a rank


def count_layers(model: ModelSpec) -> int:
    """Return the number of layers of all stacks."""
    return sum(architecture_of(model).stacks(model))


def rank_of_stage(schedule: str, ranks: int, stage: int) -> int:
    place = stage % ranks
    return ranks - 1 - place if schedule in V_SHAPED and stage >= ranks else place


def split_layers(model: ModelSpec, stages: int, seq_len: int, target_len: int | None = None) -> list[range]:
    """The layers of each stage, by number; those of an encoder-decoder are counted through both stacks."""
    layers, head = layer_flops(model, seq_len, target_len)
    return split_costs([*layers[:-1], layers[-1] + head], stages)


def split_costs(costs: list[float], parts: int) -> list[range]:
    """Consecutive parts, none empty, of which the most costly costs least; among equals, those with the smallest squares."""
    sums = [0.0, *accumulate(costs)]
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [(inf, inf, 0)] * len(costs)]
    for part in range(1, parts + 1):
        row = [(inf, inf, 0)] * (len(costs) + 1)
        for end in range(part, len(costs) + 1):
            for start in range(part - 1, end):
                most, squares, _ = best[-1][start]
                cost = sums[end] - sums[start]
                row[end] = min(row[end], (max(most, cost), squares + cost * cost, start))
        best.append(row)
    ranges: list[range] = []
    end = len(costs)
    for row in reversed(best[1:]):
        ranges.insert(0, range(row[end][2], end))
        end = row[end][2]
    return ranges


def bubble(parallel: ParallelSpec, micros: int) -> tuple[float, str]:
    """(the share of a step in which a rank has nothing to do, for stages that take equally long; the arithmetic)

    Time is counted in passes of one micro-batch through one stage: forward and backward together, or, where the backward
    pass is made in two halves, each of the three alone.
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

"""Whether CUDA graphs make the steps of several ranks shorter: by the clock.

A launched pass sums gradients over replicas beside itself, a replayed one after itself. So where the network is slow, graphs can take more
time than the host needs to launch a pass, though it is the host that limits launched passes. Steps of each kind are timed, with their
sums, and graphs are given up if theirs are slower. Both have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from argosy.parallel.cuda_graphs import CudaGraphs
from argosy.parallel.host_group import all_gather_json

# Steps of each kind that are timed, of which the shortest counts: any may be held up.
_STEPS = 2
# The trial is over after so many steps, if the number of micro-batches differs from step to step.
_MOST_STEPS = 20


class GraphTrial:
    """Times the first steps of a run, while it is open."""

    def __init__(self, graphs: CudaGraphs, device: torch.device) -> None:
        self._graphs, self._device = graphs, device
        # Seconds of steps by their kind and number of passes.
        self._launched: dict[int, list[float]] = {}
        self._replayed: dict[int, list[float]] = {}
        self._steps = 0

    @property
    def is_open(self) -> bool:
        return self._graphs.wanted is not False and self._steps < _MOST_STEPS

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a step, if the trial is open. At its end all ranks decide, if this was the last step they needed."""
        if not self.is_open:
            yield
            return
        self._steps += 1
        launched, replayed, captures = self._graphs.launched, self._graphs.replayed, self._graphs.captures
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        yield
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        launched, replayed = self._graphs.launched - launched, self._graphs.replayed - replayed
        # The first step creates communicators and compiles kernels. A capture takes as long as a launched pass.
        if self._steps > 1 and self._graphs.captures == captures and not (launched and replayed):
            kind = self._replayed if replayed else self._launched
            kind.setdefault(launched + replayed, []).append(seconds)
        self._decide(launched + replayed)

    def _decide(self, passes: int) -> None:
        one_by_one, as_graphs = self._launched.get(passes, []), self._replayed.get(passes, [])
        if min(len(one_by_one), len(as_graphs)) < _STEPS:
            return
        self._steps = _MOST_STEPS
        # A step ends when the slowest rank's does. What ranks have counted is the same on all.
        found = all_gather_json([min(one_by_one), min(as_graphs)])
        without, with_graphs = (1000 * max(times) for times in zip(*found, strict=True))
        if with_graphs > without:
            self._graphs.release(
                f"no CUDA graph is used from here on: a step took {with_graphs:.1f} ms with them and {without:.1f} without, since gradients "
                "are summed after a replayed pass; parallel.graph=on uses them all the same"
            )

"""Calibration of the memory and time models, read from `facts/calibration.yaml`.

It has two parts. A stack describes what a training framework keeps, fuses and overlaps, which follows from its code. The
constants are fitted to measurements; each has a physical meaning and is shared by all GPUs and stacks it applies to. A constant
measured on one GPU (`product.H200`) takes precedence over the shared one (`product`).
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from argosy.config.model import Section
from argosy.config.yaml_reader import read_yaml
from argosy.errors import ArgosyError
from argosy.plan.hardware import Cluster, Gpu
from argosy.plan.kernels import Rates
from argosy.plan.links import Links

FILE = Path(__file__).parent / "facts" / "calibration.yaml"
USER_FILE_VARIABLE = "ARGOSY_CALIBRATION"
# The only section a user's file may have.
SECTION = "constants"
# Matmul throughput of a streaming multiprocessor per clock, relative to Ampere. Kernels written for Ampere do not use the
# additional throughput.
WIDTH = {"hopper": 2, "blackwell": 4}


class Stack(Section):
    """A training framework as the planner models it, in bytes and choices. facts/calibration.yaml explains each field."""

    name: str
    weight: float
    gradient: float
    gradient_once: float
    widened: float = 0.0
    sharded_masters: bool = False
    optimiser: float
    logit: float
    loss: float
    accumulated: float = 0.0
    sums_in_matmul: bool = False
    part: float = 0.0
    copied: float = 0.0
    ends: bool = False
    ahead: bool = False
    chunked_loss: bool = False
    narrow_inputs: bool = False
    narrow_head: bool = False
    rounds_once: bool = False
    keeps_gathered: bool = False
    attention: Literal["native", "flash", "unfused"]
    attention_pieces: bool = False
    repeats_heads: bool = False
    fused: bool = True
    plain: bool = False
    replays: bool = False
    replays_routed: bool = False
    routes_once: bool = False
    dispatch: float = 1.0
    selective: Literal["products", "half", "scores"]
    hooked: bool = False
    early_stop: bool = False
    reduced: float
    bucket: float = 0.0
    whole_sends: bool = False
    levelled: bool = False
    overlaps: tuple[
        Literal["tensor", "tensor-backward", "send", "gradients", "copies", "replicas", "context", "experts"], ...
    ] = ()


class Calibration(Section):
    """The stacks and the fitted constants, by name."""

    stacks: dict[str, Stack]
    constants: dict[str, float]

    @property
    def fragmentation(self) -> float:
        return self.constants["fragmentation"]

    @property
    def context(self) -> float:
        return self.constants["context"]

    def rates(self, gpu: Gpu, stack: Stack, precision: str) -> Rates:
        product = gpu.peak() * 1e12 * self._share("product", gpu, self._pace(gpu))
        narrow = product
        if precision in ("fp8", "fp4") and precision in gpu.dense:
            narrow = gpu.peak(precision) * 1e12 * self._share("narrow", gpu, self._pace(gpu))
        width = WIDTH.get(gpu.architecture or "", 1)
        native = stack.attention == "native" and width > 1
        attention = self.constants["attention.native"] if native else self.constants["attention.flash"] / width
        attention = self.constants.get(f"attention.{gpu.name}", attention)
        return Rates(
            sms=gpu.sms,
            product=product,
            narrow=narrow,
            attention=gpu.peak() * 1e12 * attention,
            # Kernels of torch's, which use no more of Blackwell than of Hopper.
            pieces=gpu.peak() * 1e12 * min(attention, self.constants["attention.pieces"] * min(1.0, 2 / width)),
            memory=gpu.bandwidth * 1e9 * self._share("memory", gpu),
            passes=self.constants["passes.fused" if stack.fused else "passes.eager"],
            part=stack.part,
        )

    def _share(self, kind: str, gpu: Gpu, pace: float = 1.0) -> float:
        return self.constants.get(f"{kind}.{gpu.name}", self.constants[kind] * pace)

    def _pace(self, gpu: Gpu) -> float:
        """Return the clock under load relative to the highest clock, which the power limit of the board may not sustain."""
        needed = self.constants.get(f"power.{gpu.architecture}")
        if gpu.power is None or needed is None:
            return 1.0
        reached: float = (gpu.power / gpu.peak() / needed) ** self.constants["clock"]
        return min(1.0, reached)

    def hidden(self, stack: Stack, what: str) -> float:
        """Return the share of a communication that overlaps with computation."""
        return self.constants["overlap"] if what in stack.overlaps else 0.0

    def outside(self, stack: Stack) -> float:
        """Return the seconds of a step outside the layers."""
        return 0.0 if stack.ahead else self.constants["step"]

    def links(self, cluster: Cluster) -> Links:
        values = self.constants
        return Links(
            near=cluster.gpu.link * 1e9 * values["nvlink"],
            far=cluster.network * 1e9 * values["network"],
            near_latency=values["latency.near"],
            far_latency=values["latency.far"],
            domain=cluster.domain,
        )


@lru_cache
def calibration(user_file: str | None = None) -> Calibration:
    """Load the package's calibration, overridden by the user's file (`user_file`, or ARGOSY_CALIBRATION).

    `argosy bench --calibrate` writes such a file on the user's GPU.
    """
    tree = read_yaml(FILE)[0]
    tree["stacks"] = {name: {**row, "name": name} for name, row in tree["stacks"].items()}
    over = user_file or os.environ.get(USER_FILE_VARIABLE)
    if over:
        tree[SECTION] |= _read(Path(over))
    try:
        return Calibration.model_validate(tree)
    except ValidationError as error:
        raise _bad(str(over), error.errors()[0]["msg"]) from None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise _bad(str(path), "there is no such file")
    tree = read_yaml(path)[0]
    if not isinstance(tree, dict) or not isinstance(tree.get(SECTION), dict):
        raise _bad(str(path), f"it has no section {SECTION}")
    if unknown := sorted(set(tree) - {SECTION}):
        raise _bad(str(path), f"it has a section {unknown[0]!r}; only {SECTION} is allowed")
    return dict(tree[SECTION])


def _bad(path: str, why: str) -> ArgosyError:
    return ArgosyError(
        "plan.bad-facts",
        f"{path} cannot be used as a calibration: {why}",
        key="--calibration",
        value=path,
        fix="make one with `argosy bench --calibrate --output FILE`",
    )

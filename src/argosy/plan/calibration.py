"""Calibration: what the models of memory and time take from measurements, read from `facts/calibration.yaml`.

What a software stack keeps and overlaps is set by hand, apart from the fitted constants, each of which has a physical
meaning. Both belong to a GPU or a stack, never to a model or a row.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from argosy.config.model import Section
from argosy.config.reader import read_yaml
from argosy.errors import ArgosyError
from argosy.plan.hardware import Cluster, Gpu
from argosy.plan.kernels import Rates
from argosy.plan.links import Links

FILE = Path(__file__).parent / "facts" / "calibration.yaml"
USER_FILE_VARIABLE = "ARGOSY_CALIBRATION"
SECTIONS = ("generations", "constants")  # that a user's file may have
DEFAULT_GENERATION = "H100"


class Stack(Section):
    """What a software stack does, in bytes and choices."""

    name: str
    weight: float
    gradient: float
    gradient_once: float
    optimiser: float
    logit: float
    chunked_loss: bool = False
    narrow_inputs: bool = False
    attention: Literal["flash", "unfused"]
    selective: Literal["products", "half", "scores"]
    early_stop: bool = False
    reduced: float
    overlap_tensor: float
    overlap_send: float
    overlap_gradients: float
    overlap_experts: float = 0.0
    host: str


class Calibration(Section):
    """`constants` are the fitted ones, by name; a GPU's stand under the name of its generation."""

    stacks: dict[str, Stack]
    generations: dict[str, str]
    constants: dict[str, float]

    @property
    def fragmentation(self) -> float:
        return self.constants["fragmentation"]

    @property
    def context(self) -> float:
        return self.constants["context"]

    def rates(self, gpu: Gpu, stack: Stack, precision: str) -> Rates:
        values = self.constants
        generation = self.generations.get(gpu.name, DEFAULT_GENERATION)
        peak = gpu.peak() * 1e12
        product = peak * values[f"product.{generation}"]
        narrow = product
        if precision in ("fp8", "fp4") and precision in gpu.dense:
            narrow = gpu.peak(precision) * 1e12 * values[f"narrow.{generation}"]
        return Rates(
            sms=gpu.sms,
            product=product,
            narrow=narrow,
            attention=peak * values[f"attention.{generation}"],
            memory=gpu.bandwidth
            * 1e9
            * values.get(f"memory.{generation}", values["memory"])
            / values[f"passes.{stack.host}"],
            launch=values[f"launch.{stack.host}"],
        )

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
    """The package's, with the user's file over it (`user_file`, or what ARGOSY_CALIBRATION names): what `argosy bench
    --calibrate` wrote on a GPU of theirs."""
    tree = read_yaml(FILE)[0]
    tree["stacks"] = {name: {**row, "name": name} for name, row in tree["stacks"].items()}
    over = user_file or os.environ.get(USER_FILE_VARIABLE)
    if over:
        mine = _read(Path(over))
        for section, values in mine.items():
            tree[section] |= values
        for name in (mine.get("generations") or {}).values():
            _complete(tree["constants"], name)
    try:
        return Calibration.model_validate(tree)
    except ValidationError as error:
        raise _bad(str(over), error.errors()[0]["msg"]) from None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise _bad(str(path), "there is no such file")
    tree = read_yaml(path)[0]
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key, {}), dict) for key in SECTIONS):
        raise _bad(str(path), f"it has to hold {' and '.join(SECTIONS)}")
    if unknown := sorted(set(tree) - set(SECTIONS)):
        raise _bad(str(path), f"it has a section {unknown[0]!r}; known are {' and '.join(SECTIONS)}")
    return tree


def _complete(constants: dict[str, float], name: str) -> None:
    """What was not measured of a GPU stays as it is for the newest one that is known."""
    for kind in ("product", "narrow", "attention"):
        constants.setdefault(f"{kind}.{name}", constants[f"{kind}.{DEFAULT_GENERATION}"])


def _bad(path: str, why: str) -> ArgosyError:
    return ArgosyError(
        "plan.bad-facts",
        f"{path} cannot be used as a calibration: {why}",
        key="--calibration",
        value=path,
        fix="make one with `argosy bench --calibrate --output FILE`",
    )

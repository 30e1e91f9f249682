"""Hardware facts: GPUs, instance types and clusters, read from `facts/hardware.yaml`.

Every peak, memory size, link bandwidth and price comes from here. A user's file overrides the package's. A peak is dense (no
sparsity) and has a name, or it is unknown: MFU against a guessed peak is worse than none.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from argosy.config.model import Section
from argosy.config.units import NotNegative, Positive, PositiveNumber, Whole
from argosy.config.yaml_reader import read_yaml
from argosy.errors import ArgosyError

FACTS = Path(__file__).parent / "facts" / "hardware.yaml"
USER_FILE_VARIABLE = "ARGOSY_HARDWARE"
GIB = 2**30


@dataclass(frozen=True)
class Peak:
    """Dense matrix throughput of one device, in TFLOP/s, for 16-bit inputs with 32-bit accumulation."""

    name: str
    tflops: float

    def __str__(self) -> str:
        return f"{self.name} {self.tflops:g}"


class Gpu(Section):
    """One GPU model. Bandwidths are in GB/s, one direction; memory is in GiB."""

    name: str = ""
    device: list[str] = Field(min_length=1, description="words that the driver's name of the device contains")
    architecture: Literal["volta", "ampere", "ada", "hopper", "blackwell"] | None = Field(
        None, description="instruction set; None: no kernels are known for it"
    )
    power: PositiveNumber | None = Field(None, description="power limit of the board in watts; None: not limiting")
    sms: Positive = Field(description="streaming multiprocessors")
    dense: dict[str, PositiveNumber] = Field(description="dense TFLOP/s by the precision of the matmul's inputs")
    memory: PositiveNumber = Field(description="GiB a program can use")
    bandwidth: PositiveNumber = Field(description="memory bandwidth")
    nvlink: NotNegative = Field(0.0, description="NVLink bandwidth; 0: none")
    pcie: PositiveNumber = Field(32.0, description="PCIe bandwidth, used if there is no NVLink")
    node: Positive = Field(8, description="GPUs in a node, if no instance type is named")
    joined: Whole = Field(0, description="GPUs in an NVLink domain that spans nodes; 0: those of a node")

    def peak(self, precision: str = "bf16") -> float:
        """Return the peak TFLOP/s of matmuls in `precision`, or in 16 bits if the GPU lacks it. fp32 is 1/16 of 16 bits."""
        sixteen = self.dense.get("bf16") or self.dense.get("fp16") or max(self.dense.values())
        return self.dense.get(precision, sixteen / 16 if precision == "fp32" else sixteen)

    @property
    def link(self) -> float:
        return self.nvlink or self.pcie


class Instance(Section):
    """One instance type (node)."""

    name: str = ""
    gpu: str = Field(description="GPU model")
    gpus: Positive = Field(description="number of GPUs")
    nics: Whole = Field(0, description="network cards for collectives")
    network: NotNegative = Field(0.0, description="Gbit/s of all network cards, one direction")
    fabric: str = Field("ethernet", description="efa, infiniband, roce or ethernet")
    nvlink_nodes: Positive = Field(1, description="nodes in one NVLink domain")
    cpus: Positive | None = Field(None, description="virtual cores")
    ram: Positive | None = Field(None, description="GiB of host memory")
    allreduce_floor: PositiveNumber | None = Field(
        None, description="all-reduce bus bandwidth in GB/s below which the interconnect of several nodes is unhealthy"
    )
    price: NotNegative | None = Field(None, description="US dollars per hour")


class Facts(Section):
    gpus: dict[str, Gpu]
    instances: dict[str, Instance]


@dataclass(frozen=True)
class Cluster:
    """A set of equal nodes.

    `network` is one GPU's share of the node's network cards in GB/s, one direction. `domain` is the number of GPUs connected by
    NVLink (or PCIe). `price` is US dollars per hour for all nodes.
    """

    name: str
    gpu: Gpu
    gpus: int
    gpus_per_node: int
    network: float
    domain: int
    price: float | None = None

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def using(self, gpus: int | None) -> Cluster:
        """Return the cluster with so many GPUs of each node in use, and their part of the price. None: all of them."""
        if gpus in (None, self.gpus_per_node):
            return self
        share = gpus / self.gpus_per_node
        return replace(
            self, name=f"{self.name}, {gpus} GPUs of each", gpus=self.nodes * gpus, gpus_per_node=gpus, domain=max(1, int(self.domain * share)),
            price=None if self.price is None else self.price * share,
        )  # fmt: skip


def dense_peak(device_name: str) -> Peak | None:
    """Return the dense 16-bit peak of a device from the name its driver reports, or None if the GPU is unknown."""
    gpu = gpu_of_device(device_name)
    return None if gpu is None else Peak(gpu.name, gpu.peak())


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU that a driver reports by this name; None if it is not known, or is a slice (MIG) of one."""
    reported = device_name.lower()
    if " mig " in reported:
        return None
    for gpu in facts().gpus.values():
        if all(re.search(rf"{re.escape(word.lower())}(?![0-9])", reported) for word in gpu.device):
            return gpu
    return None


def find_gpu(name: str, user_file: str | None = None) -> Gpu:
    return _named(facts(user_file).gpus, name, "GPU", "gpus")


def find_instance(name: str, user_file: str | None = None) -> Instance:
    return _named(facts(user_file).instances, name.removeprefix("ml."), "instance type", "instances")


def usual_price(gpu: Gpu, user_file: str | None = None) -> tuple[float, str] | None:
    """Return the lowest known price of one GPU in US dollars an hour, and the instance type that has it; None if none is known."""
    having = [one for one in facts(user_file).instances.values() if one.gpu == gpu.name and one.price is not None]
    prices = [((one.price or 0.0) / one.gpus, -one.gpus, one.name) for one in having]
    return None if not prices else (min(prices)[0], min(prices)[2])


def parse_cluster(text: str, *, price: float | None = None, user_file: str | None = None) -> Cluster:
    """Parse `2xp4d.24xlarge` (nodes) or `16xH100` (GPUs).

    GPUs without an instance type are in nodes of the usual size, with one 400 Gbit/s network card for each GPU.
    """
    match = re.fullmatch(r"\s*(?:0*(\d{1,6})\s*[x*])?\s*([A-Za-z][\w.-]*)\s*", text)
    if match is None or match[1] == "0":
        raise ArgosyError(
            "plan.bad-cluster",
            f"a cluster is a number of nodes (1 to 999,999) and their type, and {text!r} is not",
            key="--cluster",
            value=text,
            fix="write it as 2xp4d.24xlarge, or 16xH100 for GPUs without a named node",
        )
    count, name = int(match[1] or 1), match[2]
    known = facts(user_file)
    gpus = {gpu.lower(): gpu for gpu in known.gpus}
    if name.lower() in gpus:
        gpu = known.gpus[gpus[name.lower()]]
        per_node = min(gpu.node, count)
        hourly = None if price is None else price * -(-count // per_node)
        return Cluster(text.strip(), gpu, count, per_node, 50.0, min(gpu.joined or per_node, count), hourly)
    instance = _named(known.instances, name.removeprefix("ml."), "GPU or instance type", "instances", also=known.gpus)
    each = instance.price if price is None else price
    return Cluster(
        name=text.strip(),
        gpu=_named(known.gpus, instance.gpu, "GPU", "gpus"),
        gpus=count * instance.gpus,
        gpus_per_node=instance.gpus,
        network=instance.network / 8 / instance.gpus,
        domain=instance.gpus * min(instance.nvlink_nodes, count),
        price=None if each is None else each * count,
    )


@lru_cache
def facts(user_file: str | None = None) -> Facts:
    """Load the package's facts, overridden by the user's file (`user_file`, or ARGOSY_HARDWARE)."""
    tree = _read(FACTS)
    over = user_file or os.environ.get(USER_FILE_VARIABLE)
    if over:
        mine = _read(Path(over))
        unknown = sorted(set(mine) - {"gpus", "instances"})
        if unknown:
            raise ArgosyError(
                "plan.bad-facts",
                f"{over} has a section {unknown[0]!r}; hardware facts have gpus and instances",
                key=unknown[0],
                fix="put GPUs under gpus: and nodes under instances:",
            )
        for section in ("gpus", "instances"):
            for name, row in (mine.get(section) or {}).items():
                tree[section][name] = {**tree[section].get(name, {}), **(row or {})}
    for section in ("gpus", "instances"):
        tree[section] = {name: {**row, "name": name} for name, row in tree[section].items()}
    try:
        return Facts.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ArgosyError(
            "plan.bad-facts",
            first["msg"],
            key=".".join(map(str, first["loc"])),
            origin=over,
            fix="see argosy/plan/facts/hardware.yaml for the keys of a GPU and of an instance",
        ) from None


def _read(path: Path) -> dict[str, Any]:
    tree = read_yaml(path)[0]
    if not isinstance(tree, dict) or not all(isinstance(part, dict) for part in tree.values()):
        raise ArgosyError(
            "plan.bad-facts",
            f"{path} is not a mapping of names to facts",
            fix="give it the sections gpus and instances",
        )
    return tree


Named = TypeVar("Named", Gpu, Instance)


def _named(
    table: Mapping[str, Named], name: str, kind: str, section: str, also: Mapping[str, object] | None = None
) -> Named:
    by_lower = {known.lower(): known for known in table}
    if name.lower() in by_lower:
        return table[by_lower[name.lower()]]
    names = sorted([*table, *(also or {})], key=str.lower)
    near = _near(name, names)
    raise ArgosyError(
        "plan.unknown-hardware",
        f"no {kind} named {name!r} is known" + (f": did you mean {' or '.join(near[:3])}?" if near else ""),
        value=name,
        key=section,
        fix=f"use one of {', '.join(near or names)}"
        + (f" (or of {len(names) - len(near)} others: `argosy config clusters`)" if near else "")
        + ", or describe it in a file (--hardware FILE)",
    )


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names that begin or end like `name`, or else those that look like it."""
    low = {one.lower(): one for one in known}
    cut = [one for key, one in low.items() if key.startswith(name.lower()) or key.endswith(name.lower())]
    return cut[:6] or [low[key] for key in difflib.get_close_matches(name.lower(), low, n=6, cutoff=0.6)]

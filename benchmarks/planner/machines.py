"""The hardware of a published row: its GPU from free text, and the links between its nodes."""

from __future__ import annotations

import re

from argosy.plan.hardware import Cluster, Gpu, facts, find_gpu

# The variant of a GPU, from its description and the GiB of its memory.
VARIANTS = (
    ("H100", "H100-96", lambda said, memory: "96GB" in said or memory == 96),
    ("H100", "H100-PCIe", lambda said, memory: "PCI" in said),
    ("H100", "H100-NVL", lambda said, memory: re.search("NVL(?!INK)", said) is not None or memory == 94),
    ("A100", "A100-40", lambda said, memory: memory == 40 or "40GB" in said),
    ("A100", "A100-80", lambda said, memory: True),
    ("V100", "V100-16", lambda said, memory: memory == 16 or "16GB" in said),
    ("V100", "V100-32", lambda said, memory: True),
)


def gpu_of(cells: dict[str, str]) -> Gpu:
    """Return the GPU of a row: the longest model number in its text, and the variant that the text or the memory size tells."""
    said = (cells.get("gpu") or "").upper()
    if not said.strip():
        raise ValueError("no GPU is named")
    numbers = sorted({name.removeprefix("RTX-").split("-")[0] for name in facts().gpus}, key=len, reverse=True)
    found = next((n for n in numbers if re.search(rf"(?<![A-WYZ0-9]){n}(?![0-9])", said)), None)
    memory = re.search(r"\d+", cells.get("gpu_mem_gb") or "")
    for kind, variant, meant in VARIANTS:
        if found == kind and meant(said, int(memory[0]) if memory else 0):
            return find_gpu(variant)
    return find_gpu(next((name for name in facts().gpus if found in (name, name.removeprefix("RTX-"))), said))


def cluster_of(cells: dict[str, str], gpu: Gpu, gpus: int, per_node: int) -> Cluster:
    """Return the cluster of a row, with the inter-node bandwidth per GPU that it states, or what was usual with such GPUs."""
    text = cells.get("internode") or ""
    for name, rate in (("EDR", 100), ("HDR", 200), ("NDR", 400), ("OPA", 100), ("Omni-Path", 100)):
        text = re.sub(rf"(\d+) ?x ?{name}\b", rf"\1x{rate}Gbps", text)
    each = {"volta": 6.25, "ampere": 25.0}.get(gpu.architecture or "", 50.0)
    # The network cards of a node.
    if match := re.search(r"(\d+) ?x ?(\d+) ?Gb", text):
        each = int(match[1]) * float(match[2]) / 8 / per_node
    # One number: for all cards of a node if the text says so or one card could not have it, else for one GPU.
    elif match := re.search(r"(\d+) ?Gb", text):
        node = "/node" in text or float(match[1]) > 800
        each = float(match[1]) / 8 / (per_node if node else 1)
    domain = gpu.joined or (72 if "NVL" in text or "NVLink domain" in text else per_node)
    return Cluster(cells["gpu"], gpu, gpus, per_node, each, min(domain, max(gpus, 1)))

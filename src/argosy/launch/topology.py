"""The PCIe topology of virtual machines that hide theirs, as a file for NCCL (`NCCL_TOPO_FILE`).

A guest of Azure's ND v5 series sees every GPU and every network card alone on a bus of its own. NCCL then cannot tell which card is next to which
GPU, and sends through the wrong socket. The file is made from the facts of the machine: on each socket, four switches with one GPU and
one card each. The run's ConfigMap carries it into the pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.config.cluster import ClusterSpec
from argosy.plan.hardware import Instance

FILE_NAME = "nccl-topology.xml"
_LINK = 'link_speed="32.0 GT/s PCIe" link_width="16"'
# PCI classes: a bridge, a 3D controller, an InfiniBand controller.
_BRIDGE, _GPU, _CARD = "0x060400", "0x030200", "0x020700"


@dataclass(frozen=True)
class Socket:
    """A CPU socket: its number of cores, and the PCI domains of its GPUs and of the network cards beside them, in hexadecimal."""

    cores: int
    gpus: tuple[str, ...]
    cards: tuple[str, ...]


# Intel Sapphire Rapids, family 6, model 143.
_ND_V5 = (
    Socket(48, ("0001", "0002", "0003", "0008"), ("0101", "0102", "0103", "0104")),
    Socket(48, ("0009", "000a", "000b", "000c"), ("0105", "0106", "0107", "0108")),
)
_HIDDEN = {"Standard_ND96isr_H100_v5": _ND_V5, "Standard_ND96isr_H200_v5": _ND_V5}


def topology_file(cluster: ClusterSpec, instance: Instance | None, fabric: str) -> str | None:
    """Return the contents of NCCL's topology file, or None for a machine that shows its own topology."""
    hides = cluster.cloud_facts.hides_topology
    if not hides or fabric != "infiniband" or instance is None or instance.name not in _HIDDEN:
        return None
    return _xml(_HIDDEN[instance.name])


def _xml(sockets: Sequence[Socket]) -> str:
    lines, first, switch = ['<system version="1">'], 0, 0
    total = sum(socket.cores for socket in sockets)
    for number, socket in enumerate(sockets):
        mask = _words(((1 << socket.cores) - 1) << first, total)
        first += socket.cores
        cpu = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"'
        lines.append(f'  <cpu numaid="{number}" affinity="{mask}" {cpu}>')
        for gpu, card in zip(socket.gpus, socket.cards, strict=True):
            switch += 1
            lines += [
                f'    <pci busid="ffff:ff:{switch:02x}.0" class="{_BRIDGE}" {_LINK}>',
                f'      <pci busid="{gpu}:00:00.0" class="{_GPU}" {_LINK}/>',
                f'      <pci busid="{card}:00:00.0" class="{_CARD}" {_LINK}/>',
                "    </pci>",
            ]
        lines.append("  </cpu>")
    return "\n".join([*lines, "</system>", ""])


def _words(mask: int, bits: int) -> str:
    """Return a CPU mask as the kernel prints it: words of 32 bits in hexadecimal, the highest first."""
    return ",".join(f"{mask >> shift & 0xFFFFFFFF:08x}" for shift in range((bits - 1) // 32 * 32, -1, -32))

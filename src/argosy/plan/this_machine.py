"""The GPUs of this machine as the NVIDIA driver lists them, for commands that do not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
# Devices of drivers that list no GPUs under /proc: that of WSL, and NVIDIA's in some containers.
_OTHER_DEVICES = (Path("/dev/dxg"), Path("/dev/nvidiactl"))


def local_gpus(environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> list[str] | None:
    """Return the names of the GPUs that CUDA would use. None: there is a driver, and it does not tell them here."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not re.search("[0-9A-Za-z]", hidden.replace("-1", "")):
        return []
    names = []
    for folder in sorted(driver.glob("*")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", (folder / "information").read_text(), re.MULTILINE)
        except OSError:
            found = None
        names += [] if found is None else [found[1]]
    if not names:
        return None if any(device.exists() for device in _OTHER_DEVICES) else []
    return names if hidden is None else names[: len(hidden.split(","))]

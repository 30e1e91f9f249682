"""Tensors to a safetensors file, hashed on the way; and back.

The format is a length, a JSON header of names, types, shapes and offsets, and the raw bytes. It is written here one
tensor at a time, so that saving needs no second copy of the model and the hash no second reading of the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from argosy.errors import ArgosyError

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and sync the file; return its SHA-256."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of eight
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ArgosyError(
            "checkpoint.corrupt", f"{path} is not a safetensors file: {error}", fix="use another checkpoint"
        ) from None

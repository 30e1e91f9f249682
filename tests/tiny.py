"""The model that tests train when they do not care which."""

from __future__ import annotations

from typing import Any

TINY_MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 257,
}

"""The small files that belong to a model beside its weights: tokenizer, special tokens, chat template, generation."""

from __future__ import annotations

import shutil
from pathlib import Path

NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip


def listed_assets(directory: Path) -> list[Path]:
    return [directory / name for name in NAMES if (directory / name).is_file()]


def copy_assets(directory: Path, to: Path) -> None:
    """Those that are not there yet: what is, was put there on purpose."""
    for path in listed_assets(directory):
        if not (to / path.name).exists():
            shutil.copyfile(path, to / path.name)

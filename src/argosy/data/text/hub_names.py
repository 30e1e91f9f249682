"""Tokenizers named by their place on the Hugging Face Hub: `hf:NAME`, `hf:OWNER/NAME`, either with `@REVISION`.

Such a name stands for a directory below the working directory, `tokenizers/hf/`, that `argosy data build` fills once. On a cluster it lies on
the shared volume, so every stage reads the same files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hf:"
_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class HubTokenizer:
    repo: str
    revision: str

    @property
    def directory(self) -> Path:
        pinned = "" if self.revision == "main" else f"@{self.revision}"
        return Path("tokenizers") / "hf" / f"{self.repo}{pinned}".replace("/", "--")


def on_hub(name: str | None) -> HubTokenizer | None:
    """Return the Hub repository a tokenizer's name means. None if it names a local file or directory, which `hf:` may precede too."""
    if name is None or not name.startswith(PREFIX):
        return None
    rest = name.removeprefix(PREFIX)
    found = _NAME.fullmatch(rest)
    return None if found is None or Path(rest).exists() else HubTokenizer(found[1], found[2] or "main")


def as_path(name: str) -> str:
    """Return the path that a tokenizer's name stands for."""
    hub = on_hub(name)
    return name.removeprefix(PREFIX) if hub is None else str(hub.directory)

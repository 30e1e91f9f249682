"""The data sets that `argosy data fetch` and `prepare.fetch` know by a short name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FirstFiles:
    """A small split that consists of the first files of another split."""

    split: str
    files: int
    about: str


@dataclass(frozen=True)
class KnownSet:
    """A data set of the Hub with a short name."""

    repo: str
    config: str | None = None
    # The folder name of a config.
    folder: str = "{config}"
    text_key: str = "text"
    small: dict[str, FirstFiles] = field(default_factory=dict)
    # The owner wants terms accepted first, so that every request needs a token.
    gated: bool = False


KNOWN = {
    # The train split has 59,166 .jsonl.zst files, 895 GB.
    "slimpajama": KnownSet("cerebras/SlimPajama-627B"),
    "c4": KnownSet(
        "allenai/c4",
        config="en",
        small={
            "train_small": FirstFiles(
                "train", 1, "the first of 1,024 files, about 356,000 documents; llm-foundry takes the first 100,000"
            ),
            "val_small": FirstFiles(
                "validation", 1, "the first of 8 files, about 45,600 documents; llm-foundry takes the first 10,000"
            ),
        },
    ),
    # A config is a language.
    "oscar": KnownSet("oscar-corpus/OSCAR-2301", folder="{config}_meta", text_key="content", gated=True),
}
_BY_REPO = {known.repo.lower(): known for known in KNOWN.values()}

# Single files by their path on the Hub.
KNOWN_FILES = {
    # 79,000 documents of OSCAR, 1.1 GB of JSON lines: the sample of Megatron-LM's examples. No token is needed.
    "oscar-1gb": "bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz",
}


def known_set(name: str) -> KnownSet | None:
    """Return the facts about a data set, by its short name, by owner/name or by its address."""
    on_hub = re.match(r"(?:hf://datasets/|https://huggingface\.co/datasets/)([^/@]+/[^/@]+)", name)
    return KNOWN.get(name.lower()) or _BY_REPO.get((on_hub[1] if on_hub else name).lower())

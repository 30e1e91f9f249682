"""The vocabulary size of a corpus: the default of `model.vocab_size`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.untrusted import read_object


def corpus_vocabulary(data: dict[str, Any]) -> tuple[int, str] | None:
    """Return the size of the tokenizer that prepared the first corpus on this machine, and the corpus; None if there is none.

    A corpus that cannot be read is passed over here: `argosy.data.open` refuses it.
    """
    sources = data.get("train")
    for source in sources if isinstance(sources, list) else ():
        path = source.get("path") if isinstance(source, dict) else None
        try:
            tokenizer = read_object(Path(str(path)) / "manifest.json").get("tokenizer")
        except (OSError, ValueError):
            continue
        size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
        if isinstance(size, int):
            return size, str(path)
    return None

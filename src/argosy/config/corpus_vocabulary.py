"""The vocabulary size of a corpus: the default of `model.vocab_size`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.untrusted import read_object


def corpus_vocabulary(data: dict[str, Any]) -> tuple[int, str] | None:
    """Return the size of the tokenizer that prepared the first corpus on this machine, and the corpus; None if there is none.

    A shard of a prepared corpus, given as a Megatron prefix, has the tokenizer of its corpus. A corpus that cannot be read is passed
    over here: `argosy.data.open` refuses it.
    """
    sources = data.get("train")
    for source in sources if isinstance(sources, list) else ():
        path = Path(str(source.get("path") if isinstance(source, dict) else None))
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        for directory, shard in ((path, None), (prefix.parent, prefix.name)):
            if (size := _tokenizer_size(directory, shard)) is not None:
                return size, str(directory)
    return None


def _tokenizer_size(directory: Path, shard: str | None) -> int | None:
    """Return the number of entries of a corpus's tokenizer, None if it has no manifest, or not one that lists `shard`."""
    try:
        manifest = read_object(directory / "manifest.json")
    except (OSError, ValueError):
        return None
    shards, tokenizer = manifest.get("shards"), manifest.get("tokenizer")
    names = [one.get("name") for one in shards if isinstance(one, dict)] if isinstance(shards, list) else []
    size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    return size if isinstance(size, int) and (shard is None or shard in names) else None

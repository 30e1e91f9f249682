"""The spec of a run by the steps it trained: `resolved.json` holds the newest, and earlier ones with the last step each of them made.

A start that changes a value counts from the first step it takes, not from the moment it was typed: a start that finds nothing to do,
is refused, or dies before its first step leaves no trace. So a checkpoint is always compared with the spec that made it, also where
later steps of another attempt were lost with it.
"""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
_PARTS = ("spec", "machine")  # that may change between starts


def version_at(document: Document, step: int | None) -> Document:
    """The spec and the machine that made `step`; the newest where no step is given."""
    made = [earlier for earlier in document["earlier"] if step is not None and earlier["until"] >= step]
    return min(made, key=lambda earlier: int(earlier["until"])) if made else {part: document[part] for part in _PARTS}


def earlier_versions(document: Document, new: Document, step: int, oldest: int) -> list[Document]:
    """What is kept of a stored document once `new` goes on from `step`: versions that checkpoints from step `oldest` on were made with."""
    before = version_at(document, step)
    kept = [earlier for earlier in document["earlier"] if oldest <= earlier["until"] < step]
    if step and any(before[part] != new[part] for part in _PARTS):
        kept.append({"until": step, **{part: before[part] for part in _PARTS}})
    return kept

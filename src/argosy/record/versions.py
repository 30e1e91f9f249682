"""The versions of a run's spec: `resolved.json` holds the newest, and earlier ones with the last step that each trained.

A changed spec is stored when its first step has been taken. A start that has nothing to do, is refused, or dies before its
first step leaves no version. So a checkpoint is always compared with the spec that trained it, even if later steps of another
attempt were lost.
"""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
# The parts of resolved.json that may change between starts.
_PARTS = ("spec", "machine")


def version_at(document: Document, step: int | None) -> Document:
    """Return the spec and machine that trained `step`; without a step, the newest."""
    made = [earlier for earlier in document["earlier"] if step is not None and earlier["until"] >= step]
    return min(made, key=lambda earlier: int(earlier["until"])) if made else {part: document[part] for part in _PARTS}


def earlier_versions(document: Document, new: Document, step: int, oldest: int) -> list[Document]:
    """Return the earlier versions to store when `new` resumes after `step`: those of checkpoints from step `oldest` on."""
    before = version_at(document, step)
    kept = [earlier for earlier in document["earlier"] if oldest <= earlier["until"] < step]
    if step and any(before[part] != new[part] for part in _PARTS):
        kept.append({"until": step, **{part: before[part] for part in _PARTS}})
    return kept

"""Validation corpora of other trainers' launches, in `data.validation`."""

from __future__ import annotations

from typing import Any

from argosy.config.foreign.draft import Draft


def take_over_validation(draft: Draft, setting: str, corpora: list[dict[str, Any]]) -> None:
    """Set `data.validation` to corpora that are separate from the training corpora.

    Weights are for training only: each validation corpus has a loss of its own. A corpus in object storage needs a cache directory;
    where the other trainer names none, the corpora are listed instead.

    Args:
        setting: The other trainer's name of the setting, as the user wrote it.
        corpora: The corpora as entries of `data.train`: `path`, and `weight` or `cache` where they are given.
    """
    if any("://" in str(corpus["path"]) and "cache" not in corpus for corpus in corpora):
        paths = ", ".join(str(corpus["path"]) for corpus in corpora)
        draft.left.append(f"{setting} ({paths}): set data.validation, with a cache for what is in object storage")
        return
    draft.set(
        "data.validation", [{key: corpus[key] for key in ("path", "cache") if key in corpus} for corpus in corpora]
    )

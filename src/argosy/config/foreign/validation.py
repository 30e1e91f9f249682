"""Validation data of their own in other trainers' settings: the one place that says what becomes of them."""

from __future__ import annotations

from typing import Any

from argosy.config.foreign.draft import Draft


def take_over_validation(draft: Draft, setting: str, corpora: list[dict[str, Any]]) -> None:
    """List validation corpora that are separate from the training corpora.

    A run spec has one list of corpora, `data.train`, and `data.split` holds back a share of each. Evaluation of the converted
    run therefore reads other documents than the other trainer's.

    Args:
        setting: The other trainer's name of the setting, as the user wrote it.
        corpora: The corpora as entries of `data.train`: `path`, and `weight` or `cache` where they are given.
    """
    paths = ", ".join(str(corpus["path"]) for corpus in corpora)
    draft.left.append(
        f"{setting} ({paths}): not taken over; validation documents are a share of the training corpora (data.split)"
    )

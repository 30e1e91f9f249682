"""Where documents begin and end inside packed samples, found from the end-of-document token (EOD) alone.

A packed sample is a window of the token stream and may hold the end of one document, several whole ones and the start
of another. A document runs up to and including its EOD; the next one begins behind it, and a row always begins one.
From that follow document ids (for masks that keep attention inside a document), positions that restart, the bounds
that variable-length attention kernels take, and labels without the one prediction that crosses documents: the token
after an EOD. All work on tokens of shape [.., S], whole batches at once, and rows do not touch each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -100  # a label that does not count towards the loss
Rows = npt.NDArray[Any]  # token ids of any integer type  # [.., S]


def document_ids(tokens: Rows, eod: int) -> npt.NDArray[np.int32]:
    """0, 1, 2 … along each row.  # [.., S]"""
    ends = tokens == eod
    return np.asarray(np.cumsum(ends, axis=-1, dtype=np.int32) - ends, np.int32)


def restarting_positions(tokens: Rows, eod: int) -> npt.NDArray[np.int64]:
    """How far each token is from the start of its document, or of the row: Megatron's reset_position_ids.  # [.., S]"""
    places = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int64), tokens.shape)
    return np.asarray(places - np.maximum.accumulate(np.where(_begins(tokens, eod), places, 0), axis=-1))


def mask_eod_labels(tokens: Rows, labels: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.int64]:
    """The labels, IGNORED where the input token is the EOD: Megatron's eod_mask_loss.

    What follows an EOD is the start of an unrelated document and cannot be foretold. The EOD itself stays a label: a
    model must learn to end. [.., S]
    """
    return np.where(tokens == eod, IGNORED, labels)


def document_bounds(tokens: Rows, eod: int) -> npt.NDArray[np.int32]:
    """Where each document of the whole batch begins when its rows are laid end to end, and the batch's size last.

    This is the `cu_seqlens` of variable-length attention; the longest document is `np.diff(bounds).max()`.
    """
    starts = np.flatnonzero(_begins(tokens, eod))
    return np.append(starts, tokens.size).astype(np.int32)


def _begins(tokens: Rows, eod: int) -> npt.NDArray[np.bool_]:
    begins = np.ones(tokens.shape, bool)
    begins[..., 1:] = tokens[..., :-1] == eod
    return begins

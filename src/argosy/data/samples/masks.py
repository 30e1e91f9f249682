"""Document masks for packed samples, computed from the end-of-document token (EOD) alone.

A packed sample is a window of the token stream. It may hold the end of one document, several whole documents and the start
of another. A document ends with its EOD, the next one begins after it, and every row begins a document. From that follow
document ids (for attention masks), position ids that restart, the `cu_seqlens` of variable-length attention, and labels
without the one prediction that crosses documents: the token after an EOD. All functions take tokens of shape [.., S] and
treat rows independently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# The label of a position that is left out of the loss.
IGNORED = -100
# Token ids of any integer type.
Rows = npt.NDArray[Any]  # [.., S]


def document_ids(tokens: Rows, eod: int) -> npt.NDArray[np.int32]:
    """Return the document number of each token, counted from 0 in each row.  # [.., S]"""
    ends = tokens == eod
    return np.asarray(np.cumsum(ends, axis=-1, dtype=np.int32) - ends, np.int32)


def restarting_positions(tokens: Rows, eod: int) -> npt.NDArray[np.int64]:
    """Return position ids that restart at each document, as Megatron's reset_position_ids does.  # [.., S]"""
    places = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int64), tokens.shape)
    return np.asarray(places - np.maximum.accumulate(np.where(_begins(tokens, eod), places, 0), axis=-1))


def mask_eod_labels(tokens: Rows, labels: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.int64]:
    """Return the labels with IGNORED where the input token is the EOD, as Megatron's eod_mask_loss does.  # [.., S]

    The token after an EOD starts an unrelated document and cannot be predicted. The EOD itself stays a label: a model must
    learn to end.
    """
    return np.where(tokens == eod, IGNORED, labels)


def document_bounds(tokens: Rows, eod: int) -> npt.NDArray[np.int32]:
    """Return the `cu_seqlens` of variable-length attention: the start of each document in the flattened batch, and its size.

    The longest document has `np.diff(bounds).max()` tokens.
    """
    starts = np.flatnonzero(_begins(tokens, eod))
    return np.append(starts, tokens.size).astype(np.int32)


def _begins(tokens: Rows, eod: int) -> npt.NDArray[np.bool_]:
    begins = np.ones(tokens.shape, bool)
    begins[..., 1:] = tokens[..., :-1] == eod
    return begins

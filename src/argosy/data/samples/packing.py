"""Packing: documents of different lengths into rows of one length, by best fit in decreasing order.

The longest document goes first, each into the row where the least room is left over. Documents of equal length are taken in an
order that the seed chooses. The result is a pure function of the lengths, the row length and the seed.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from argosy.data.samples.order import Indices, permute


def pack(lengths: Indices, room: int, seed: int) -> tuple[Indices, Indices]:
    """Pack documents into rows.

    Args:
        lengths: The length of each document, at least 1 and at most `room`.
        room: The length of a row.
        seed: Orders documents of equal length.

    Returns:
        The documents row by row, and where each row begins among them, with the end.  # [documents], [rows + 1]
    """
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    shuffled = permute(np.arange(len(lengths), dtype=np.int64), len(lengths), seed)
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    # Rows by the room left in them, and the sizes of room that occur, in ascending order.
    open_rows: dict[int, list[int]] = {}
    rooms: list[int] = []
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, left = len(rows), room - length
            rows.append([document])
        else:
            found = rooms[place]
            row, left = open_rows[found].pop(), found - length
            rows[row].append(document)
            if not open_rows[found]:
                del open_rows[found], rooms[place]
        if left:
            if left not in open_rows:
                insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return np.array([document for row in rows for document in row], np.int64), starts

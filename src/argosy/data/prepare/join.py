"""From the parts of a shard to the shard: appended in the order of their names, as soon as each one's turn has come.

The parts stay until the shard is finished, so that a job that is killed has lost nothing but the joining.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, Written
from argosy.data.prepare.parts import PartFacts, PartName
from argosy.data.samples.order import permute
from argosy.record.files import replace_file


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}"


def books_of(parts: Path, shard: int) -> Path:
    """Written when a shard is complete: what it holds, and what its parts held."""
    return parts / f"{shard_name(shard)}.json"


class Joiner:
    """One shard. Its parts are every `stride`-th block of each input; `shuffle_key` puts its documents in a random
    order instead of that of the inputs."""

    def __init__(
        self,
        parts: Path,
        output: Path,
        shard: int,
        dtype: np.dtype[Any],
        *,
        first_block: int,
        stride: int,
        shuffle_key: int | None,
    ) -> None:
        self.parts, self.shard, self.stride, self.shuffle_key = parts, shard, stride, shuffle_key
        self._writer = IndexedWriter(output / shard_name(shard), dtype)
        self._turn = PartName(
            0, first_block
        )  # the part that comes next, as far as can be known while some are being made
        self._waiting: dict[PartName, PartFacts] = {}
        self._joined: list[tuple[PartName, PartFacts]] = []
        self._finished = False

    def add(self, name: PartName, facts: PartFacts) -> None:
        if facts.past_end:
            return
        self._waiting[name] = facts
        while self.shuffle_key is None and self._turn in self._waiting:
            self._join(self._turn)

    def finish(self) -> None:
        names = sorted(self._waiting)
        if self.shuffle_key is None:
            for name in names:
                self._join(name)
        else:
            _add_shuffled(self._writer, [IndexedReader(self.parts / str(name)) for name in names], self.shuffle_key)
            self._joined = [(name, self._waiting[name]) for name in names]
        written = self._writer.finish()
        self._finished = True
        self._check(written.documents)
        self._keep_books(written)

    def close(self) -> None:
        if not self._finished:
            self._writer.abandon()

    def _join(self, name: PartName) -> None:
        reader = IndexedReader(self.parts / str(name))
        self._writer.add_pair(reader)
        reader.close()
        self._joined.append((name, self._waiting.pop(name)))
        self._turn = PartName(name.group, name.block + self.stride)

    def _check(self, written: int) -> None:
        facts = [facts for _, facts in self._joined]
        lost = written != sum(f.documents for f in facts)
        if lost or any(f.records != f.documents + sum(f.quarantined.values()) for f in facts):
            raise RuntimeError(f"documents were lost in shard {self.shard}: {written} written of {facts}")

    def _keep_books(self, written: Written) -> None:
        names = [name for name, _ in self._joined]
        quarantine = b"".join((self.parts / f"{name}.quarantine.jsonl").read_bytes() for name in names)
        books = books_of(self.parts, self.shard)
        replace_file(books.with_suffix(".quarantine.jsonl"), quarantine)
        facts = {
            "shard": asdict(written) | {"name": shard_name(self.shard)},
            "parts": [asdict(f) for _, f in self._joined],
        }
        replace_file(books, orjson.dumps(facts))
        for name in names:  # the shard has it all
            for suffix in (".bin", ".idx", ".quarantine.jsonl"):
                (self.parts / f"{name}{suffix}").unlink(missing_ok=True)


def _add_shuffled(writer: IndexedWriter, readers: list[IndexedReader], key: int) -> None:
    starts = np.cumsum([0, *(reader.documents for reader in readers)])
    order = permute(np.arange(starts[-1]), int(starts[-1]), key) if starts[-1] else np.zeros(0, np.int64)
    for document in order:
        which = int(np.searchsorted(starts, document, side="right")) - 1
        reader, within = readers[which], int(document - starts[which])
        first, last = (int(reader.document_indices[within + i]) for i in (0, 1))
        start, end = reader.token_at_document(within), reader.token_at_document(within + 1)
        writer.add_many(reader.read(start, end - start), reader.lengths[first:last], np.array([last - first]))

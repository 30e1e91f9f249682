"""Join the parts of a shard in the order of their names, each one as soon as all before it are joined.

The parts stay until the shard is finished, so a killed job loses only the joining.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, Written, bin_path, idx_path
from argosy.data.prepare.parts import PartFacts, PartName
from argosy.data.samples.order import permute
from argosy.files import replace_file


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}"


def shard_facts_path(parts: Path, shard: int) -> Path:
    """Return the path of a finished shard's facts: its counts and hashes, and the facts of its parts."""
    return parts / f"{shard_name(shard)}.json"


class Joiner:
    """The writer of one shard, for the corpus of each key.

    `expect` announces the parts in order; `add` appends each part once all parts before it have been added. With `shuffle_key`,
    `finish` writes all documents in random order instead.
    """

    def __init__(
        self, parts: Path, corpora: list[Path], shard: int, dtype: np.dtype[Any], *, shuffle_key: int | None
    ) -> None:
        self.parts, self.shard, self.shuffle_key = parts, shard, shuffle_key
        self._writers = [IndexedWriter(corpus / shard_name(shard), dtype, blocks=True) for corpus in corpora]
        self._expected: deque[PartName] = deque()
        self._waiting: dict[PartName, PartFacts] = {}
        self._joined: list[tuple[PartName, PartFacts]] = []
        self._finished = False

    def expect(self, name: PartName) -> None:
        """Announce the next part."""
        self._expected.append(name)

    def add(self, name: PartName, facts: PartFacts) -> None:
        """Add a finished part, in any order."""
        self._waiting[name] = facts
        while self._expected and self._expected[0] in self._waiting:
            self._join(self._expected.popleft())

    def finish(self) -> None:
        """Finish the shard, check that no document was lost, write its facts, and remove the parts."""
        written = []
        for key, writer in enumerate(self._writers):
            # The permutation is by document number, so the corpora of all keys stay aligned.
            if self.shuffle_key is not None:
                readers = [IndexedReader(self.parts / name.pair(key)) for name, _ in self._joined]
                _add_shuffled(writer, readers, self.shuffle_key)
            written.append(writer.finish())
        self._finished = True
        self._check(written)
        self._write_facts(written)

    def close(self) -> None:
        """Remove the temporary files of an unfinished shard."""
        if not self._finished:
            for writer in self._writers:
                writer.abandon()

    def _join(self, name: PartName) -> None:
        facts = self._waiting.pop(name)
        if facts.past_end:
            return
        for key, writer in enumerate(self._writers if self.shuffle_key is None else ()):
            reader = IndexedReader(self.parts / name.pair(key))
            writer.add_pair(reader)
            reader.close()
        self._joined.append((name, facts))

    def _check(self, written: list[Written]) -> None:
        facts = [facts for _, facts in self._joined]
        lost = {pair.documents for pair in written} != {sum(f.documents for f in facts)}
        if lost or any(f.records != f.documents + sum(f.quarantined.values()) for f in facts):
            raise RuntimeError(f"documents were lost in shard {self.shard}: {written} written of {facts}")

    def _write_facts(self, written: list[Written]) -> None:
        names = [name for name, _ in self._joined]
        quarantine = b"".join((self.parts / f"{name}.quarantine.jsonl").read_bytes() for name in names)
        path = shard_facts_path(self.parts, self.shard)
        replace_file(path.with_suffix(".quarantine.jsonl"), quarantine)
        facts = {
            "shards": [asdict(pair) | {"name": shard_name(self.shard)} for pair in written],
            "parts": [asdict(f) | {"name": str(name)} for name, f in self._joined],
        }
        replace_file(path, orjson.dumps(facts))
        # The shard holds everything now.
        for name in names:
            (self.parts / f"{name}.quarantine.jsonl").unlink(missing_ok=True)
            for key in range(len(written)):
                for path_of in (bin_path, idx_path):
                    path_of(self.parts / name.pair(key)).unlink(missing_ok=True)


def _add_shuffled(writer: IndexedWriter, readers: list[IndexedReader], key: int) -> None:
    starts = np.cumsum([0, *(reader.documents for reader in readers)])
    order = permute(np.arange(starts[-1]), int(starts[-1]), key) if starts[-1] else np.zeros(0, np.int64)
    for document in order:
        which = int(np.searchsorted(starts, document, side="right")) - 1
        reader, within = readers[which], int(document - starts[which])
        first, last = (int(reader.document_indices[within + i]) for i in (0, 1))
        start, end = reader.token_at_document(within), reader.token_at_document(within + 1)
        writer.add_many(reader.read(start, end - start), reader.lengths[first:last], np.array([last - first]))

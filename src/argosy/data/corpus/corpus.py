"""A prepared corpus as one contiguous token stream over all shards, divided into splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.corpus_manifest import FILE_NAME, Manifest, read_manifest
from argosy.data.corpus.indexed import IndexedReader, Tokens
from argosy.errors import ArgosyError

SPLITS = ("train", "validation", "test")
# The scan for the largest id reads about _SCAN_BLOCKS blocks of _SCAN_TOKENS tokens.
_SCAN_TOKENS = 1 << 22
_SCAN_BLOCKS = 64


@dataclass(frozen=True)
class Split:
    """A split of a corpus: documents [first, last), which are tokens [start, end)."""

    name: str
    first: int
    last: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Corpus:
    """A corpus opened for reading."""

    # True if tokens are downloaded as they are read, so that `prefetch` is useful.
    is_remote = False

    def __init__(self, path: Path, shards: list[IndexedReader], manifest: Manifest | None) -> None:
        self.path, self.shards, self.manifest = path, shards, manifest
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._document_starts = np.cumsum([0, *(shard.documents for shard in shards)])

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def documents(self) -> int:
        return int(self._document_starts[-1])

    def read(self, start: int, count: int) -> Tokens:
        """Read `count` tokens from `start` on, across shards."""
        pieces = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while count > 0:
            offset = start - int(self._starts[shard])
            here = min(count, self.shards[shard].tokens - offset)
            if here > 0:
                pieces.append(self.shards[shard].read(offset, here))
            start, count, shard = start + here, count - here, shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def token_range(self, document: int) -> tuple[int, int]:
        """Return the first token of a document, and the one after its last."""
        return self._token_at(document), self._token_at(document + 1)

    def sequence_lengths(self, document: int) -> npt.NDArray[np.int32]:
        """Return the number of tokens of each sequence of a document."""
        at = int(np.searchsorted(self._document_starts, document, side="right")) - 1
        shard, within = self.shards[at], document - int(self._document_starts[at])
        first, last = shard.document_indices[within : within + 2]
        return shard.lengths[first:last]

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Announce the next reads as (start, count), nearest first. Local files need no prefetch, so this does nothing."""

    def split(self, shares: tuple[float, float, float]) -> dict[str, Split]:
        """Divide the documents into contiguous splits in file order, with Megatron's rounding: round(share x documents)."""
        # Add one by one: `sum` rounds differently from Python 3.12 on, which could move a bound by one document.
        running = list(accumulate(shares, initial=0.0))
        bounds = [round(share / running[-1] * self.documents) for share in running]
        tokens = [self._token_at(document) for document in bounds]
        return {name: Split(name, *bounds[at : at + 2], *tokens[at : at + 2]) for at, name in enumerate(SPLITS)}

    def max_token(self) -> int:
        """Return the largest token id, from the manifest or by a scan.

        The scan reads all tokens, or evenly spaced blocks of a large corpus. Batches are checked again as they are read.
        """
        if self.manifest is not None:
            return max(shard.max_token for shard in self.manifest.shards)
        return max((int(block.max()) for block in self.blocks(_SCAN_TOKENS, _SCAN_BLOCKS)), default=0)

    def blocks(self, size: int, most: int) -> Iterator[Tokens]:
        """Yield the tokens in blocks of `size`: all of them, or of a large corpus about `most` blocks at even distances."""
        blocks = -(-self.tokens // size)
        for block in range(0, blocks, max(1, blocks // most)):
            yield self.read(block * size, min(size, self.tokens - block * size))

    def facts(self) -> dict[str, Any]:
        """Return the identity of the corpus, independent of its path. A resumed run must find the same identity."""
        digest = hashlib.sha256()
        for shard in self.manifest.shards if self.manifest is not None else ():
            digest.update(f"{shard.bin_sha256}{shard.idx_sha256}".encode())
        for reader in self.shards if self.manifest is None else ():
            digest.update(reader.lengths.tobytes())
        return {"documents": self.documents, "tokens": self.tokens, "sha256": digest.hexdigest()}

    def _token_at(self, document: int) -> int:
        shard = min(int(np.searchsorted(self._document_starts, document, side="right")) - 1, len(self.shards) - 1)
        within = document - int(self._document_starts[shard])
        return int(self._starts[shard]) + self.shards[shard].token_at_document(within)


def open_corpus(path: Path) -> Corpus:
    """Open a corpus: a directory with a manifest, or the prefix of one Megatron `.bin/.idx` pair."""
    if (path / FILE_NAME).exists():
        manifest = read_manifest(path)
        shards = [IndexedReader(path / shard.name) for shard in manifest.shards]
        for shard, promised in zip(shards, manifest.shards, strict=True):
            if (shard.tokens, shard.documents) != (promised.tokens, promised.documents):
                raise ArgosyError(
                    "data.bad-manifest",
                    f"{shard.prefix}: the manifest promises {promised.documents:,} documents and {promised.tokens:,} tokens, "
                    f"the files hold {shard.documents:,} and {shard.tokens:,}",
                    fix="the files were replaced: prepare the corpus again",
                )
        return Corpus(path, shards, manifest)
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    if (path / ".parts").exists():
        raise ArgosyError(
            "data.bad-manifest",
            f"{path} is an unfinished `argosy data prepare`",
            key="data.train",
            value=str(path),
            fix="run the same `argosy data prepare` again: it resumes where it stopped",
        )
    if path.is_dir():
        pairs = sorted(str(p.with_suffix("")) for p in path.glob("*.idx"))
        # `prepare` with several keys writes one corpus per key.
        corpora = sorted(str(p.parent) for p in path.glob(f"*/{FILE_NAME}"))
        hint = "run `argosy data prepare … --output` on it first"
        if pairs or corpora:
            hint = f"give one of those in it: {', '.join((corpora or pairs)[:8])}"
        raise ArgosyError(
            "data.not-found",
            f"{path} is a directory without a {FILE_NAME}",
            key="data.train",
            value=str(path),
            fix=hint,
        )
    if not any(path.with_name(path.name + suffix).exists() for suffix in (".bin", ".idx")):
        raise ArgosyError(
            "data.not-found",
            f"there is no {path}",
            key="data.train",
            value=str(path),
            fix=f"make it with `argosy data prepare … --output {path}`, or check the path",
        )
    return Corpus(path, [IndexedReader(path)], None)

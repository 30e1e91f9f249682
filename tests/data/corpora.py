"""Corpora and pairs built by hand for tests. Documents are lists of sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from argosy.data.corpus.corpus_manifest import Manifest, Shard, Source, TokenizerFacts, write_manifest
from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, Written
from argosy.data.text.tokenizer import ByteTokenizer

Documents = Sequence[Sequence[Sequence[int]]]


def write_pair(prefix: Path, documents: Documents, dtype: str = "uint16", *, blocks: bool = False) -> Written:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(prefix, np.dtype(dtype), blocks=blocks)
    for document in documents:
        writer.add_document([np.array(sequence, dtype) for sequence in document])
    return writer.finish()


def write_corpus(
    directory: Path, shards: Sequence[Documents], *, append_eod: bool = True, blocks: bool = False
) -> Path:
    """Write a corpus of the byte tokenizer with these shards. `blocks` also writes the hashes of blocks."""
    written = [write_pair(directory / f"shard-{i:05d}", docs, blocks=blocks) for i, docs in enumerate(shards)]
    tokenizer = ByteTokenizer()
    name, content = tokenizer.stored()
    (directory / name).write_bytes(content)
    facts = TokenizerFacts(
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id if append_eod else None,
        file=name,
    )
    documents_in = sum(shard.documents for shard in written)
    manifest = Manifest(
        tokenizer=facts,
        append_eod=append_eod,
        dtype="uint16",
        shards=[Shard(name=f"shard-{i:05d}", **asdict(shard)) for i, shard in enumerate(written)],
        sources=[Source(path="made by hand", bytes=0, documents=documents_in, quarantined=1)],
        quarantined={"broken-json": 1},
    )
    write_manifest(directory, manifest)
    return directory


def text_document(text: str) -> list[list[int]]:
    return [[*text.encode(), 256]]


def read_pair(prefix: Path) -> list[list[list[int]]]:
    """Return the documents of a pair as they were given to `write_pair`, without sequences that have no tokens."""
    reader = IndexedReader(prefix)
    bounds = reader.document_indices.tolist()
    documents = [[reader.sequence(i).tolist() for i in range(first, last)] for first, last in pairwise(bounds)]
    reader.close()
    return documents

"""A benchmark of sample order and reading at the size of a real corpus: no index is built, and a sample takes microseconds.

It makes a sparse corpus of 10 M documents and 5 B tokens in a temporary directory; no tokens are written.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.indexed import HEADER, MAGIC, IndexedReader, bin_path, idx_path
from argosy.data.samples.megatron_order import MegatronSamples
from argosy.data.samples.windows import SampleStream, Windows

DOCUMENTS, TOKENS, SEQ_LEN = 10_000_000, 5_000_000_000, 4096


def make_sparse(prefix: Path) -> None:
    lengths = np.full(DOCUMENTS, TOKENS // DOCUMENTS, np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, DOCUMENTS, DOCUMENTS + 1))
        for part in (lengths, pointers, np.arange(DOCUMENTS + 1, dtype=np.int64)):
            part.tofile(file)
    with bin_path(prefix).open("wb") as file:
        file.truncate(TOKENS * 2)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "big"
        make_sparse(prefix)
        started = time.perf_counter()
        corpus = Corpus(prefix, [IndexedReader(prefix)], None)
        stream = SampleStream([Windows(corpus, corpus.split((98, 2, 0))["train"], SEQ_LEN)], None, seed=1)
        stream.batch(0, 8)
        print(f"first batch after {time.perf_counter() - started:.3f} s")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        samples = 20_000
        for first in range(0, samples, 50):
            stream.batch(first, 50)
        seconds = time.perf_counter() - started
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{1e6 * seconds / samples:.1f} us a sample of {SEQ_LEN} tokens, memory grew {grown:.0f} MiB")
        lengths = corpus.shards[0].lengths
        started = time.perf_counter()
        exact = MegatronSamples(lengths, seq_len=SEQ_LEN, num_samples=None, seed=1)
        print(f"Megatron's order of it, one epoch, ready after {time.perf_counter() - started:.2f} s")
        started = time.perf_counter()
        for index in range(5_000):
            exact.pieces(index)
        print(f"{1e6 * (time.perf_counter() - started) / 5_000:.1f} us to find a sample's pieces")


if __name__ == "__main__":
    main()

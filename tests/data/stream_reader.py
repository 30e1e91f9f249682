"""Read a streamed corpus as training does. As a program, it is the process that tests start by the dozen and kill."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from pathlib import Path

import numpy as np

from argosy.data.corpus.corpus import Corpus
from argosy.data.remote.objects import ObjectStore
from argosy.data.remote.stream import StreamedCorpus, open_streamed
from argosy.data.samples.windows import SampleStream, Windows

BLOCK = 4096


def patient(url: str, retry_timeout_s: float = 240.0, attempt_s: float = 10.0) -> ObjectStore:
    """Return a store that waits longer for an answer than any server takes on a busy machine, so that nothing is asked for twice."""
    return ObjectStore(url, retry_timeout_s=retry_timeout_s, attempt_s=attempt_s)


def samples(corpus: Corpus, seq_len: int = 64) -> SampleStream:
    return SampleStream([Windows(corpus, corpus.split((1.0, 0.0, 0.0))["train"], seq_len)], None, 7)


def batches(corpus: Corpus, count: int = 200, seq_len: int = 64, announce: int = 0) -> str:
    """Return the digest of the first `count` training samples, prefetching `announce` samples ahead."""
    order, digest = samples(corpus, seq_len), hashlib.sha256()
    for first in range(0, count, 20):
        if announce:
            assert isinstance(corpus, StreamedCorpus)
            _, windows = order.locate(np.arange(first, first + announce, dtype=np.int64))
            corpus.prefetch([(int(window) * seq_len, seq_len + 1) for window in windows])
        batch = order.batch(first, 20)
        digest.update(batch.tokens.tobytes() + batch.labels.tobytes())
    return digest.hexdigest()


def main(url: str, cache: str, limit: str, count: str) -> None:
    # A background job would inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An answer that came too late would be asked for again, and other processes may be paused for seconds.
    store = patient(url, attempt_s=240.0)
    corpus = open_streamed(url, Path(cache), json.loads(limit), block_bytes=BLOCK, store=store)
    print("open", flush=True)
    print(batches(corpus, int(count), announce=60), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

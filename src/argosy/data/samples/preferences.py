"""Samples of preferences: the chosen and the rejected conversation of a pair in one row, which do not see each other.

A document has four sequences: the prompt and the chosen answer, the prompt again and the rejected answer. A pair that is longer
than a row is left out. The log-probabilities of the answers by the reference model are read from two files beside the corpus, which
`argosy data reference` writes:

    reference.json  which model computed them (with a hash of its weights), and for which corpus
    reference.f32   for each document, the log-probability of the chosen and of the rejected answer, 32-bit floats; NaN for a
                    pair longer than data.seq_len
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.conversations import conversation_sizes, read_conversation
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.order import Indices, epoch_order
from argosy.data.samples.windows import Batch, check_ids
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.untrusted import MIB, read_object, read_regular

FACTS_FILE, NUMBERS_FILE = "reference.json", "reference.f32"
_MOST_BYTES = 1024 * MIB
_log = logging.getLogger(__name__)
LogProbabilities = npt.NDArray[np.float32]  # [documents, 2]


class PreferenceRows:
    """The pairs of one split of one corpus: sample i is pair number i % count of epoch i // count."""

    def __init__(
        self,
        corpus: Corpus,
        split: Split,
        seq_len: int,
        vocab_size: int,
        seed: int,
        *,
        beta: float,
        reference: LogProbabilities,
    ) -> None:
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self._vocab_size, self._beta, self._reference = vocab_size, beta, reference
        sizes, _ = conversation_sizes(corpus)
        documents = np.arange(split.first, split.last, dtype=np.int64)
        self._documents = documents[sizes[documents] <= seq_len]
        self.count = len(self._documents)
        if self.count < len(documents):
            _log.info(
                "%s, %s: %d of %d pairs are longer than data.seq_len %d and are left out",
                corpus.path, split.name, len(documents) - self.count, len(documents), seq_len,
            )  # fmt: skip
        if not self.count:
            raise ArgosyError(
                "data.empty-split",
                f"the {split.name} split of {corpus.path} has {len(documents):,} of {corpus.documents:,} pairs, none of at most "
                f"data.seq_len {seq_len} tokens",
                key="data.split",
                fix=f"give {split.name} a larger share, add data, or lengthen data.seq_len",
            )
        if np.isnan(reference[self._documents]).any():
            raise _no_reference(corpus.path, f"those beside it leave out pairs of up to data.seq_len {seq_len} tokens")

    def batch(self, indices: Indices) -> Batch:
        documents = self._documents[epoch_order(indices, self.count, self.seed)]
        batch = pair_rows(self.corpus, documents, self.seq_len)
        check_ids(batch.tokens, self._vocab_size, lambda row: f"pair {documents[row]} of {self.corpus.path}")
        chosen, rejected = self._reference[documents].T
        scaled = np.stack((np.full(len(documents), self._beta), self._beta * (chosen - rejected)), axis=1)
        return Batch(batch.tokens, batch.labels, batch.inputs | {"preference": scaled.astype(np.float32)})

    def ranges(self, indices: Indices) -> list[range]:
        documents = self._documents[epoch_order(indices, self.count, self.seed)]
        return [range(*self.corpus.token_range(int(document))) for document in documents]


def pair_rows(corpus: Corpus, documents: Indices, seq_len: int) -> Batch:
    """Return the pairs of these documents, one in each row. Both conversations count from position 0."""
    shape = (len(documents), seq_len)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    # The padding is a document of its own.
    sides, positions = np.full(shape, 2, np.int32), np.zeros(shape, np.int64)
    for row, document in enumerate(documents):
        text, learnt = read_conversation(corpus, int(document), seq_len)
        chosen = int(corpus.sequence_lengths(int(document))[:2].sum())
        tokens[row, : len(text)] = text
        labels[row, : len(text) - 1] = np.where(learnt[1:], text[1:], IGNORED)
        for side, (first, last) in enumerate(((0, chosen), (chosen, len(text)), (len(text), seq_len))):
            sides[row, first:last], positions[row, first:last] = side, np.arange(last - first)
    return Batch(tokens, labels, {"documents": sides, "positions": positions})


def write_reference(corpus: Corpus, model: str, identity: str, numbers: LogProbabilities) -> None:
    """Store the log-probabilities of all documents by a model, the facts last. `identity` is a hash of its weights."""
    content = np.ascontiguousarray(numbers, "<f4").tobytes()
    replace_file(corpus.path / NUMBERS_FILE, content, sync=True)
    facts = {"model": model, "corpus": corpus.facts()["sha256"], "documents": corpus.documents}
    facts |= {"weights": identity, "sha256": hashlib.sha256(content).hexdigest()}
    replace_file(corpus.path / FACTS_FILE, orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n", sync=True)


def read_reference(corpus: Corpus, model: str | None) -> LogProbabilities:
    """Return the stored log-probabilities. Refuse those of another model than the run starts from, or of another corpus."""
    facts = _reference_facts(corpus)
    try:
        content = read_regular(corpus.path / NUMBERS_FILE, _MOST_BYTES)
    except (OSError, ValueError):
        raise _no_reference(corpus.path, "there are none beside it") from None
    if facts.get("corpus") != corpus.facts()["sha256"] or len(content) != 8 * corpus.documents:
        raise _no_reference(corpus.path, f"{FACTS_FILE} is about another corpus")
    # Files of an older version have no hash.
    if facts.get("sha256") not in (None, hashlib.sha256(content).hexdigest()):
        raise _no_reference(corpus.path, f"{NUMBERS_FILE} is not the file that {FACTS_FILE} describes")
    if facts.get("model") != model:
        raise _no_reference(
            corpus.path, f"those beside it are by {facts.get('model')}, and this run starts from {model}"
        )
    return np.frombuffer(content, "<f4").reshape(-1, 2).astype(np.float32)


def reference_identity(corpus: Corpus) -> dict[str, str]:
    """Return what a run records about the reference: a resumed run must find the same."""
    facts = _reference_facts(corpus)
    return {f"reference_{key}": facts[key] for key in ("weights", "sha256") if key in facts}


def require_reference_by(corpus: Corpus, identity: str) -> None:
    """Refuse a reference by other weights than those a run starts from."""
    if _reference_facts(corpus).get("weights") not in (None, identity):
        raise _no_reference(corpus.path, "the model that computed those beside it has other weights now")


def _reference_facts(corpus: Corpus) -> dict[str, Any]:
    try:
        return read_object(corpus.path / FACTS_FILE)
    except (OSError, ValueError):
        raise _no_reference(corpus.path, "there are none beside it") from None


def _no_reference(path: Path, why: str) -> ArgosyError:
    return ArgosyError(
        "data.not-found",
        f"{path} needs the log-probabilities of its answers by the reference model: {why}",
        key="data.train",
        value=str(path),
        fix="argosy data reference RUN.yaml",
    )

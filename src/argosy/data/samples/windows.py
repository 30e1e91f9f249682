"""Training samples: windows of the token stream, in an order that is a pure function of (seed, sample index).

A split of T tokens holds (T - 1) // seq_len windows; window w covers tokens [w x seq_len, (w + 1) x seq_len], so
consecutive windows share one token and every token but the first is predicted once per epoch. Epoch e shuffles the
windows by a bijection keyed by (seed, corpus, epoch). Nothing depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from argosy.config.seeds import derive_seed
from argosy.data.corpus.corpus import Corpus, Split
from argosy.data.samples.fim import FillInTheMiddle
from argosy.data.samples.masks import IGNORED, document_ids, mask_eod_labels, restarting_positions
from argosy.data.samples.order import Blend, Indices, permute
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Batch:
    """A batch of `count` samples. For a decoder, labels are the tokens shifted by one. IGNORED labels are left out of the loss."""

    tokens: npt.NDArray[np.int64]  # [count, seq_len]
    labels: npt.NDArray[np.int64]  # [count, seq_len]
    # Further arguments of the model by name, such as position ids.
    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # [count, ..]

    @property
    def valid_tokens(self) -> int:
        """The number of labels that count in the loss. The summed loss of the batch is divided by it."""
        return int((self.labels != IGNORED).sum())

    def rows(self, first: int, last: int) -> Batch:
        """Return samples first .. last - 1 of the batch as views."""
        inputs = {name: array[first:last] for name, array in self.inputs.items()}
        return Batch(self.tokens[first:last], self.labels[first:last], inputs)

    @property
    def read_tokens(self) -> int:
        """The number of tokens that pass through the model, including those of a second sequence (inputs named `…_tokens`)."""
        return self.tokens.size + sum(array.size for name, array in self.inputs.items() if name.endswith("_tokens"))


class Stream(Protocol):
    """The interface of a reproducible stream of samples, in any order."""

    @property
    def sets(self) -> Sequence[SampleSet]: ...
    @property
    def epoch_samples(self) -> int:
        """The number of samples in one epoch of all corpora, blended by size."""

    def batch(self, first: int, count: int) -> Batch:
        """Return samples first .. first + count - 1 of the stream."""

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return (corpus, place in it) of each sample index."""

    def prefetch(self, first: int, count: int) -> None:
        """Start downloading the samples that will be read next. It does nothing for local corpora."""

    def epochs_after(self, samples: int) -> list[float]:
        """Return the number of epochs of each corpus that `samples` samples amount to."""


class SampleSet(Protocol):
    """The samples of one corpus in a stream."""

    corpus: Corpus
    count: int


S = TypeVar("S", bound=SampleSet)


class Blended(Generic[S]):
    """An endless blend of sample sets by weights, or by size if there are no weights."""

    def __init__(self, sets: Sequence[S], weights: Sequence[float] | None) -> None:
        self.sets = list(sets)
        self.weights = list(weights) if weights is not None else [float(s.count) for s in sets]
        self._blend = Blend(self.weights)

    @property
    def epoch_samples(self) -> int:
        """The number of samples in one epoch of all corpora, blended by size."""
        return sum(s.count for s in self.sets)

    def epochs_after(self, samples: int) -> list[float]:
        """Return the number of epochs of each corpus that `samples` samples amount to."""
        total = sum(self.weights)
        return [samples * w / total / s.count for w, s in zip(self.weights, self.sets, strict=True)]


class Maker(Protocol):
    """The interface of a function that turns rows of the token stream into a batch."""

    def batch(self, rows: npt.NDArray[np.int64], first: int, name: Callable[[int], str]) -> Batch:
        """Build a batch.

        Args:
            rows: The tokens of samples `first`, `first` + 1, … of a stream, [count, seq_len + 1].
            first: The sample index of the first row.
            name: A function that describes where a row came from, for error messages.
        """


@dataclass(frozen=True)
class BatchMaker:
    """Causal language-model batches: token ids checked against the vocabulary, then FIM and document masks as configured.

    Each `*_eod` field is the end-of-document id, or None if that option is off.
    """

    vocab_size: int
    seed: int = 0
    fim: FillInTheMiddle | None = None
    # The token after an EOD is left out of the loss.
    masked_eod: int | None = None
    # Attention does not cross an EOD.
    parting_eod: int | None = None
    # Position ids restart after an EOD.
    restarting_eod: int | None = None

    def batch(self, rows: npt.NDArray[np.int64], first: int, name: Callable[[int], str]) -> Batch:
        check_ids(rows, self.vocab_size, name)
        if self.fim is not None:
            # A sample index occurs only once in a run, so the epoch need not be part of the key.
            indices = range(first, first + len(rows))
            rows = self.fim.rearrange(rows, self.seed, [0] * len(rows), indices)
        tokens, labels = rows[:, :-1], rows[:, 1:]
        if self.masked_eod is not None:
            labels = mask_eod_labels(tokens, labels, self.masked_eod)
        inputs: dict[str, npt.NDArray[Any]] = {}
        if self.parting_eod is not None:
            inputs["documents"] = document_ids(tokens, self.parting_eod)
        if self.restarting_eod is not None:
            inputs["positions"] = restarting_positions(tokens, self.restarting_eod)
        return Batch(tokens, labels, inputs)


def check_ids(rows: npt.NDArray[np.int64], vocab_size: int, name: Callable[[int], str]) -> None:
    """Refuse token ids outside the vocabulary before they reach a model. `name` describes where a row came from."""
    if rows.max() < vocab_size and rows.min() >= 0:
        return
    row = int(np.argmax(((rows >= vocab_size) | (rows < 0)).any(axis=1)))
    found = int(rows[row].max() if rows[row].max() >= vocab_size else rows[row].min())
    raise ArgosyError(
        "tokenizer.vocabulary",
        f"{name(row)} holds token id {found:,}; the model's vocabulary is {vocab_size:,}",
        key="model.vocab_size",
        value=vocab_size,
        fix="the files were damaged or swapped since they were checked: prepare the corpus again",
    )


class Windows:
    """The windows of one split of one corpus."""

    def __init__(self, corpus: Corpus, split: Split, seq_len: int) -> None:
        self.corpus, self.split, self.seq_len = corpus, split, seq_len
        self.count = max(0, split.tokens - 1) // seq_len

    def read_into(self, row: npt.NDArray[np.int64], window: int) -> None:
        """Read the tokens of a window and the one after it into `row` [seq_len + 1]."""
        row[:] = self.corpus.read(self.split.start + window * self.seq_len, self.seq_len + 1)

    def require_one(self) -> None:
        """Refuse a split that is too small for one sample."""
        if self.count:
            return
        need = self.seq_len + 1
        raise ArgosyError(
            "data.empty-split",
            f"the {self.split.name} split of {self.corpus.path} has {self.split.last - self.split.first:,} of "
            f"{self.corpus.documents:,} documents = {self.split.tokens:,} tokens; one sample of data.seq_len "
            f"{self.seq_len} needs {need:,} (with the token after it)",
            key="data.split",
            fix=f"give {self.split.name} a larger share, add data, or shorten data.seq_len"
            + ("; `eval: off` needs no validation split" if self.split.name == "validation" else ""),
        )


class SampleStream(Blended[Windows]):
    """An endless, reproducible stream of shuffled windows from one or more corpora."""

    def __init__(
        self, sets: Sequence[Windows], weights: Sequence[float] | None, seed: int, maker: Maker | None = None
    ) -> None:
        for windows in sets:
            windows.require_one()
        super().__init__(sets, weights)
        self._maker, self.seed = maker or BatchMaker(vocab_size=2**62), seed

    def batch(self, first: int, count: int) -> Batch:
        """Return samples first .. first + count - 1 of the stream."""
        corpus, window = self.locate(np.arange(first, first + count, dtype=np.int64))
        rows = np.empty((count, self.sets[0].seq_len + 1), np.int64)
        for row, c, w in zip(rows, corpus, window, strict=True):
            self.sets[c].read_into(row, int(w))
        return self._maker.batch(
            rows, first, lambda row: f"window {int(window[row])} of {self.sets[corpus[row]].corpus.path}"
        )

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return (corpus, window) of each sample index."""
        corpus, local = self._blend.locate(indices)
        window = np.empty(len(indices), np.int64)
        for c, windows in enumerate(self.sets):
            mine = corpus == c
            epochs, positions = np.divmod(local[mine], windows.count)
            found = np.empty(len(epochs), np.int64)
            for epoch in np.unique(epochs):
                key = derive_seed(self.seed, "order", c, windows.split.name, epoch)
                found[epochs == epoch] = permute(positions[epochs == epoch], windows.count, key)
            window[mine] = found
        return corpus, window

    def prefetch(self, first: int, count: int) -> None:
        """Start downloading the windows of samples first .. first + count - 1 from remote corpora."""
        if not any(windows.corpus.is_remote for windows in self.sets):
            return
        corpus, window = self.locate(np.arange(first, first + count, dtype=np.int64))
        for c, s in enumerate(self.sets):
            s.corpus.prefetch([(s.split.start + int(w) * s.seq_len, s.seq_len + 1) for w in window[corpus == c]])

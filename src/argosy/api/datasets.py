"""Corpora and training samples as torch datasets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from argosy.api.run_specs import Source, resolve_run
from argosy.data.corpus.corpus import open_corpus
from argosy.data.open import open_data

Split = Literal["train", "validation", "test"]


class CorpusDataset(Dataset[Tensor]):
    """The documents of a prepared corpus, or of a Megatron `.bin/.idx` pair, in file order: `len(corpus)`, `corpus[i]`.

    An item is a one-dimensional tensor of token ids (int64). A DataLoader with worker processes opens the files again in
    each of them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._corpus = open_corpus(self.path)

    def __len__(self) -> int:
        return self._corpus.documents

    def __getitem__(self, index: int) -> Tensor:
        start, end = self._corpus.token_range(_place(index, len(self)))
        return torch.from_numpy(self._corpus.read(start, end - start).astype(np.int64))

    @property
    def tokens(self) -> int:
        """The number of tokens in all documents."""
        return self._corpus.tokens

    def __reduce__(self) -> tuple[type[CorpusDataset], tuple[str]]:
        return CorpusDataset, (str(self.path),)


class SampleDataset(Dataset[dict[str, Tensor]]):
    """The samples a run is trained on, in the order it reads them: item `i` is sample `i` of the run, bit for bit.

    An item is a dict of tensors: `tokens` and `labels` ([seq_len], int64; labels of -100 are left out of the loss) and
    whatever else the task needs, as `documents` for a document mask. `len` is one epoch of the split; `read` has the samples
    of later epochs too.

    Args:
        run: the path of a run.yaml, or the same keys as a dict.
        split: the share of the documents to read, see `data.split`.
        overrides: changed keys in dotted form, as `{"data.seq_len": 1024}`.
    """

    def __init__(self, run: Source, split: Split = "train", overrides: Mapping[str, Any] | None = None) -> None:
        self._arguments = (run, split, overrides)
        data = open_data(resolve_run(run, overrides))
        self._stream = data.training() if split == "train" else data.whole(split)

    def __len__(self) -> int:
        return self._stream.epoch_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.read(_place(index, len(self)))

    def read(self, index: int) -> dict[str, Tensor]:
        """Return sample `index` of the run. Training goes on into the next epoch, and so may the index."""
        batch = self._stream.batch(index, 1)
        arrays = {"tokens": batch.tokens, "labels": batch.labels, **batch.inputs}
        return {name: torch.from_numpy(np.ascontiguousarray(array[0])) for name, array in arrays.items()}

    def __reduce__(self) -> tuple[type[SampleDataset], tuple[Source, Split, Mapping[str, Any] | None]]:
        return SampleDataset, self._arguments


def _place(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} of a dataset of {length}")
    return index % length

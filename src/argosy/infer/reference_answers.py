"""The log-probabilities of the answers of preferences by the model a run starts from: the reference of DPO, computed once."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from argosy.config.schema import RunSpec
from argosy.console.progress_bar import ProgressBar
from argosy.data.corpus.corpus import Corpus
from argosy.data.open import open_data
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.preferences import LogProbabilities, pair_rows, write_reference
from argosy.errors import ArgosyError
from argosy.infer.loading import Loaded, load_model
from argosy.tasks.task_registry import task_of


def write_references(spec: RunSpec, *, device: str | None = None) -> list[str]:
    """Compute and store the log-probabilities of every corpus of a run. Return one message for each."""
    task = task_of(spec)
    if task.records != "preferences" or spec.init_from is None:
        raise ArgosyError(
            "config.conflict",
            f"a reference is for preferences and the model they start from: the task is {task.name}, init_from {spec.init_from}",
            key="data.task",
            value=task.name,
            fix="data.task=dpo and init_from=hf:DIR or a run",
        )
    # The precision of the run: the model it starts from may have been trained in another.
    loaded = load_model(spec.init_from, device=device, train=spec.train)
    identity = loaded.source.identity()
    said = []
    data = open_data(spec)
    for corpus in (*data.corpora, *data.validation):
        write_reference(corpus, spec.init_from, identity, reference_of(loaded, corpus, spec.data.seq_len))
        said.append(f"{corpus.path}: log-probabilities of {corpus.documents:,} pairs by {spec.init_from}")
    return said


@torch.no_grad()
def reference_of(loaded: Loaded, corpus: Corpus, seq_len: int) -> LogProbabilities:
    """Return the log-probabilities of the chosen and the rejected answer of each document. They do not depend on padding.

    Documents longer than `seq_len`, which training leaves out, have NaN."""
    found = np.full((corpus.documents, 2), np.nan, np.float32)
    with ProgressBar("reference", corpus.documents, "pairs") as bar:
        for document in range(corpus.documents):
            bar.advance(1)
            start, end = corpus.token_range(document)
            if end - start > seq_len:
                continue
            row = pair_rows(corpus, np.array([document]), end - start)
            tokens, labels, documents, positions = (
                torch.from_numpy(array).long().to(loaded.device)
                for array in (row.tokens, row.labels, row.inputs["documents"], row.inputs["positions"])
            )
            logits = loaded.model(tokens, documents=documents, positions=positions)
            for side in (0, 1):
                mine = labels.masked_fill(documents != side, IGNORED)
                lost = F.cross_entropy(logits[0].float(), mine[0], ignore_index=IGNORED, reduction="sum")
                found[document, side] = -float(lost)
    return found

"""The base class of tasks whose samples are made of documents: BERT's and inverse cloze."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from argosy.config.seeds import derive_seed
from argosy.tasks.task import Opened, S, Task

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus, Split
    from argosy.data.samples.document_stream import DocumentSet
    from argosy.data.samples.windows import Stream


class DocumentTask(Task[S]):
    """A task whose samples are made of documents: pairs of segments, or a sentence and its block."""

    def stream(
        self, opened: Opened, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None, *, training: bool
    ) -> Stream:
        from argosy.data.samples.document_stream import DocumentStream

        sets = []
        for number, corpus in enumerate(corpora):
            part = corpus.split(opened.run.data.split)[split]
            sets.append(self.document_set(opened, corpus, part, number))
        return DocumentStream(sets, weights)

    def document_set(self, opened: Opened, corpus: Corpus, part: Split, number: int) -> DocumentSet:
        """Return the samples of one split of a corpus, the `number`th of the run."""
        raise NotImplementedError

    def token_ids(self, opened: Opened) -> dict[str, int]:
        """Return the id of each special token by its role."""
        settings = self.settings(opened.run)
        return {
            role: opened.special.id_of(f"data.{self.section}.{role}", getattr(settings, role)) for role in self.roles
        }


def document_seed(opened: Opened, part: Split, number: int) -> int:
    return derive_seed(opened.run.train.seed, "documents", number, part.name)


def ends_in_eod(opened: Opened, corpus: Corpus) -> bool:
    """Return whether each document of a corpus ends in the end-of-document token."""
    if corpus.manifest is not None:
        return corpus.manifest.append_eod
    if opened.eod is None or not corpus.tokens:
        return False
    return int(corpus.read(corpus.tokens - 1, 1)[0]) == opened.eod

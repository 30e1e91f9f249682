"""Inverse cloze: a retriever finds the block of text that a sentence was taken from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.config.model import Section
from argosy.config.origins import Origins
from argosy.config.units import NotBool, Positive
from argosy.errors import ArgosyError
from argosy.families.architecture import RETRIEVER
from argosy.tasks.document_task import DocumentTask, document_seed, ends_in_eod
from argosy.tasks.task import Opened, Run, SpecialToken

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus, Split
    from argosy.data.samples.document_stream import DocumentSet
    from argosy.data.samples.windows import Batch


class IctSpec(Section):
    """Inverse cloze task (ICT): the samples of a two-tower encoder (`model.retrieval`). Blocks have `data.seq_len` tokens."""

    query_len: Positive = Field(64, description="tokens in a query, [CLS] and [SEP] included")
    query_in_block: Annotated[float, Field(ge=0, le=1), NotBool] = Field(
        0.1, description="share of samples whose query stays in its block"
    )
    cls: SpecialToken = Field("[CLS]", description="the token a query or block begins with, or its id")
    sep: SpecialToken = Field("[SEP]", description="the token after a query or block, or its id")
    pad: SpecialToken = Field("[PAD]", description="the padding token, or its id")


class InverseClozeTask(DocumentTask[IctSpec]):
    name = "inverse-cloze"
    samples = "queries and blocks (data.ict)"
    predicts_tokens = False
    architectures = (RETRIEVER,)
    section = "ict"
    settings_type = IctSpec
    roles = ("cls", "sep", "pad")

    def check(self, run: Run, origins: Origins) -> None:
        super().check(run, origins)
        query_len, longest = self.settings(run).query_len, run.model.max_seq_len
        if run.train.z_loss:
            raise ArgosyError(
                "config.conflict",
                "the z-loss is of logits over a vocabulary, and a model with retrieval has none",
                key="train.z_loss",
                value=run.train.z_loss,
                origin=origins.get("train.z_loss"),
                fix="leave it out",
            )
        if query_len > longest:
            raise ArgosyError(
                "config.arithmetic",
                f"queries of {query_len} tokens are longer than the model's {longest} positions",
                key="data.ict.query_len",
                value=query_len,
                origin=origins.get("data.ict.query_len"),
                fix=f"data.ict.query_len={longest}, or less",
            )
        if run.parallel.micro_batch < 2:
            raise ArgosyError(
                "config.arithmetic",
                "a query's wrong answers are the other blocks of its micro-batch: with a micro_batch of 1 there are none",
                key="parallel.micro_batch",
                value=run.parallel.micro_batch,
                origin=origins.get("parallel.micro_batch"),
                fix="as large a micro_batch as fits, and a global_batch that is a multiple of it",
            )

    def other_lengths(self, run: Run) -> dict[str, int | None]:
        return {"data.ict.query_len": self.settings(run).query_len}

    def document_set(self, opened: Opened, corpus: Corpus, part: Split, number: int) -> DocumentSet:
        from argosy.data.samples.ict import ClozeSamples, InverseCloze

        ict = self.settings(opened.run)
        how = InverseCloze(
            opened.run.data.seq_len,
            ict.query_len,
            opened.run.model.vocab_size,
            **self.token_ids(opened),
            query_in_block=ict.query_in_block,
        )
        seed = document_seed(opened, part, number)
        return ClozeSamples(corpus, part, how, seed, number=number, ends_in_eod=ends_in_eod(opened, corpus))

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        import numpy as np

        from argosy.data.samples.windows import Batch

        tokens, queries = draw(run.data.seq_len), draw(self.settings(run).query_len)
        inputs = {
            "padding_mask": np.ones(tokens.shape, bool),
            "query_tokens": queries,
            "query_padding_mask": np.ones(queries.shape, bool),
        }
        return Batch(tokens, np.arange(len(tokens)), inputs)

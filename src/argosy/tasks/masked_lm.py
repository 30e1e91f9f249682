"""Masked language modelling, BERT's task: an encoder predicts masked tokens, and whether two segments belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.config.model import Section
from argosy.config.units import NotBool, Positive
from argosy.families.architecture import ENCODER, PREDICTED_SHARE
from argosy.tasks.document_task import DocumentTask, document_seed, ends_in_eod
from argosy.tasks.task import Opened, Run, SpecialToken

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus, Split
    from argosy.data.samples.document_stream import DocumentSet
    from argosy.data.samples.windows import Batch


class BertSpec(Section):
    """Masked language modelling: the samples of an encoder. The defaults are BERT's."""

    mask_rate: Annotated[float, Field(gt=0, le=1), NotBool] = Field(
        PREDICTED_SHARE, description="share of the text's tokens to predict"
    )
    max_ngram: Positive = Field(1, description="most consecutive tokens that are masked together")
    short_seq_prob: Annotated[float, Field(ge=0, le=1), NotBool] = Field(
        0.1, description="share of samples that have a random shorter length"
    )
    cls: SpecialToken = Field("[CLS]", description="the token a sample begins with, or its id")
    sep: SpecialToken = Field("[SEP]", description="the token after each segment, or its id")
    mask: SpecialToken = Field("[MASK]", description="the token that replaces masked tokens, or its id")
    pad: SpecialToken = Field("[PAD]", description="the padding token, or its id")

    @property
    def mask_in_text(self) -> str:
        """The text in a prompt that stands for a token to fill in."""
        return self.mask if isinstance(self.mask, str) else "[MASK]"


class MaskedLMTask(DocumentTask[BertSpec]):
    name = "masked-lm"
    samples = "masked segments (data.bert)"
    architectures = (ENCODER,)
    section = "bert"
    settings_type = BertSpec
    roles = ("cls", "sep", "mask", "pad")
    writes = "masks"

    def document_set(self, opened: Opened, corpus: Corpus, part: Split, number: int) -> DocumentSet:
        from argosy.data.samples.bert_samples import BertSamples, MaskedLM

        run, bert = opened.run, self.settings(opened.run)
        how = MaskedLM(
            run.data.seq_len,
            run.model.vocab_size,
            **self.token_ids(opened),
            pair=run.model.pair or "none",
            mask_rate=bert.mask_rate,
            max_ngram=bert.max_ngram,
            short_seq_prob=bert.short_seq_prob,
            # Rows of the vocabulary beyond the tokenizer's are padding.
            words=None if opened.tokenizer is None else opened.tokenizer.vocab_size,
        )
        seed = document_seed(opened, part, number)
        return BertSamples(corpus, part, how, seed, ends_in_eod=ends_in_eod(opened, corpus))

    def predicted_share(self, run: Run) -> float | None:
        return self.settings(run).mask_rate

    def example_prompt(self, run: Run) -> str:
        return f"Once upon a {self.settings(run).mask_in_text}"

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        import numpy as np

        from argosy.data.samples.bert_samples import MaskedLM
        from argosy.data.samples.masks import IGNORED
        from argosy.data.samples.windows import Batch

        tokens = draw(run.data.seq_len)
        pair, rate = run.model.pair or "none", self.settings(run).mask_rate
        how = MaskedLM(
            run.data.seq_len, run.model.vocab_size, cls=0, sep=1, mask=2, pad=3, pair=pair, mask_rate=rate
        )  # fmt: skip
        count = len(tokens)
        inputs = {
            "token_types": np.zeros_like(tokens),
            "padding_mask": np.ones(tokens.shape, bool),
            "predicted": np.broadcast_to(np.arange(how.predictions), (count, how.predictions)).copy(),
            "pair_labels": np.zeros(count, np.int64) if run.model.judges_pairs else np.full(count, IGNORED),
        }
        return Batch(tokens, draw(how.predictions), inputs)

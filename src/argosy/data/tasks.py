"""How the samples of a run are made, from its spec and its tokenizer: BERT's, T5's and those of inverse cloze.

Special tokens are named, or given as ids where the tokenizer has no such token: a free id beyond its entries will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.config.schema import BertSpec, IctSpec, RunSpec, SpecialToken, T5Spec
from argosy.config.seeds import derive_seed
from argosy.data.corpus.corpus import Corpus
from argosy.data.samples.bert import BertSamples, MaskedLM
from argosy.data.samples.document_stream import DocumentSet, DocumentStream
from argosy.data.samples.ict import ClozeSamples, InverseCloze
from argosy.data.samples.t5 import SpanCorruption, SpanMaker
from argosy.data.samples.windows import SampleStream, Windows
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Tasks:
    """`eod` is the token that ends documents, where one does."""

    spec: RunSpec
    tokenizer: Tokenizer | None
    eod: int | None

    def documents(self, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None) -> DocumentStream:
        """BERT's samples, or those of inverse cloze."""
        data = self.spec.data
        sets: list[DocumentSet] = []
        for number, corpus in enumerate(corpora):
            part, ends = corpus.split(data.split)[split], self._ends_in_eod(corpus)
            seed = derive_seed(self.spec.train.seed, "documents", number, split)
            if data.ict is not None:
                sets.append(ClozeSamples(corpus, part, self._cloze(data.ict), seed, number=number, ends_in_eod=ends))
            else:
                sets.append(BertSamples(corpus, part, self._masked(data.bert or BertSpec()), seed, ends_in_eod=ends))
        return DocumentStream(sets, weights)

    def spans(self, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None) -> SampleStream:
        """T5's samples: windows of the token stream, just so long that their corrupted form fills data.seq_len."""
        data, seed = self.spec.data, self.spec.train.seed
        task = self.span_corruption(data.t5 or T5Spec())
        sets = [Windows(corpus, corpus.split(data.split)[split], task.text_len) for corpus in corpora]
        return SampleStream(sets, weights, seed, SpanMaker(self.spec.model.vocab_size, seed, task))

    def span_corruption(self, t5: T5Spec) -> SpanCorruption:
        task = SpanCorruption(
            self.spec.data.seq_len,
            self._id("t5.sentinel", t5.sentinel),
            self._id("t5.eos", t5.eos),
            decoder_start=self._id("t5.pad", t5.pad),
            noise_density=t5.noise_density,
            mean_span=t5.mean_span,
            sentinels=t5.sentinels,
        )
        self._require_sentinels(t5, task)
        return task

    def _masked(self, bert: BertSpec) -> MaskedLM:
        return MaskedLM(
            self.spec.data.seq_len,
            self.spec.model.vocab_size,
            **{role: self._id(f"bert.{role}", getattr(bert, role)) for role in ("cls", "sep", "mask", "pad")},
            pair=self.spec.model.pair or "none",
            mask_rate=bert.mask_rate,
            max_ngram=bert.max_ngram,
            short_seq_prob=bert.short_seq_prob,
        )

    def _cloze(self, ict: IctSpec) -> InverseCloze:
        return InverseCloze(
            self.spec.data.seq_len,
            ict.query_len,
            self.spec.model.vocab_size,
            **{role: self._id(f"ict.{role}", getattr(ict, role)) for role in ("cls", "sep", "pad")},
            query_in_block=ict.query_in_block,
        )

    def _id(self, key: str, token: SpecialToken) -> int:
        rows = self.spec.model.vocab_size
        found = token if isinstance(token, int) else None if self.tokenizer is None else self.tokenizer.id_of(token)
        if found is not None and found < rows:
            return found
        entries = 0 if self.tokenizer is None else self.tokenizer.vocab_size
        if found is None:
            cause = f"there is no token {token!r} in " + (
                "the data: a bare pair has no tokenizer" if self.tokenizer is None else "the tokenizer"
            )
        else:
            cause = f"its id {found:,} is beyond the model's vocabulary of {rows:,}"
        raise ArgosyError(
            "tokenizer.vocabulary",
            cause,
            key=f"data.{key}",
            value=token,
            fix=f"name a token of the tokenizer, or give an id that is free (its own end at {entries - 1:,}) and below "
            f"model.vocab_size {rows:,}, enlarging that if need be",
        )

    def _require_sentinels(self, t5: T5Spec, task: SpanCorruption) -> None:
        """The tokens below the first sentinel are sentinels too, and not words of the tokenizer."""
        if self.tokenizer is None or not isinstance(t5.sentinel, str) or not t5.sentinel.endswith("0>"):
            return
        for i in range(task.lengths.spans):
            name = t5.sentinel.removesuffix("0>") + f"{i}>"
            if self.tokenizer.id_of(name) != task.first_sentinel - i:
                raise ArgosyError(
                    "tokenizer.vocabulary",
                    f"samples of {task.seq_len} tokens have {task.lengths.spans} spans, whose sentinels are the ids "
                    f"{task.first_sentinel} down to {task.first_sentinel - task.lengths.spans + 1}; {name} is "
                    f"{self.tokenizer.id_of(name)} in the tokenizer, not {task.first_sentinel - i}",
                    key="data.t5.sentinel",
                    value=t5.sentinel,
                    fix="use a tokenizer with T5's sentinels, or give the id of the first of free ones",
                )

    def _ends_in_eod(self, corpus: Corpus) -> bool:
        if corpus.manifest is not None:
            return corpus.manifest.append_eod
        if self.eod is None or not corpus.tokens:
            return False
        return int(corpus.read(corpus.tokens - 1, 1)[0]) == self.eod

"""How the samples of a run are made, from its spec and its tokenizer: BERT's, T5's and those of inverse cloze."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.config.schema import BertSpec, IctSpec, RunSpec, T5Spec
from argosy.config.seeds import derive_seed
from argosy.data.corpus.corpus import Corpus
from argosy.data.samples.bert import BertSamples, MaskedLM
from argosy.data.samples.document_stream import DocumentSet, DocumentStream
from argosy.data.samples.ict import ClozeSamples, InverseCloze
from argosy.data.samples.t5 import SpanCorruption, SpanMaker
from argosy.data.samples.windows import SampleStream, Windows
from argosy.data.special import SpecialTokens
from argosy.data.text.tokenizer import Tokenizer


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
        sentinels = self._special.sentinels(t5)
        return SpanCorruption(
            self.spec.data.seq_len,
            sentinels[-1],
            self._special.id_of("data.t5.eos", t5.eos),
            decoder_start=self._special.id_of("data.t5.pad", t5.pad),
            noise_density=t5.noise_density,
            mean_span=t5.mean_span,
            sentinels=len(sentinels),
        )

    def _masked(self, bert: BertSpec) -> MaskedLM:
        return MaskedLM(
            self.spec.data.seq_len,
            self.spec.model.vocab_size,
            **{
                role: self._special.id_of(f"data.bert.{role}", getattr(bert, role))
                for role in ("cls", "sep", "mask", "pad")
            },
            pair=self.spec.model.pair or "none",
            mask_rate=bert.mask_rate,
            max_ngram=bert.max_ngram,
            short_seq_prob=bert.short_seq_prob,
            words=None if self.tokenizer is None else self.tokenizer.vocab_size,  # rows beyond it are padding
        )

    def _cloze(self, ict: IctSpec) -> InverseCloze:
        return InverseCloze(
            self.spec.data.seq_len,
            ict.query_len,
            self.spec.model.vocab_size,
            **{role: self._special.id_of(f"data.ict.{role}", getattr(ict, role)) for role in ("cls", "sep", "pad")},
            query_in_block=ict.query_in_block,
        )

    @property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer, self.spec.model.vocab_size)

    def _ends_in_eod(self, corpus: Corpus) -> bool:
        if corpus.manifest is not None:
            return corpus.manifest.append_eod
        if self.eod is None or not corpus.tokens:
            return False
        return int(corpus.read(corpus.tokens - 1, 1)[0]) == self.eod

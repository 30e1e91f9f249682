"""`argosy data inspect`: statistics of a corpus, and the text of a few documents.

Counts and lengths are exact and come from the `.idx` files, so they take moments at any size. Figures that need tokens
(vocabulary range, duplicates, text) come from a sample, whose size is shown beside each figure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.duplicates import Duplicates, estimate_duplicates
from argosy.data.corpus.lengths import PERCENTILES, Bin, LengthCounts, count_lengths, draw
from argosy.data.corpus.pairs import open_pairs
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.errors import ArgosyError

# The vocabulary is sampled in _SAMPLE_RUNS runs of _RUN_TOKENS tokens.
_SAMPLE_RUNS, _RUN_TOKENS = 64, 1 << 18
_SHOWN_TOKENS, _SHOWN_CHARACTERS = 400, 240
_SHOWN_SOURCES = 3


@dataclass(frozen=True)
class Vocabulary:
    """The token ids found in a sample."""

    sampled_tokens: int
    smallest: int
    largest: int
    distinct: int
    # The largest id of the whole corpus according to the manifest.
    promised_largest: int | None
    tokenizer_size: int | None


@dataclass(frozen=True)
class Shown:
    """The beginning of one document, as text."""

    document: int
    tokens: int
    text: str


@dataclass(frozen=True)
class CorpusFacts:
    """The result of `inspect`."""

    path: str
    has_manifest: bool
    shards: int
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    bytes: int
    dtype: str
    mean_length: float
    shortest: int
    longest: int
    percentiles: dict[str, int]
    histogram: list[Bin]
    vocabulary: Vocabulary
    duplicates: Duplicates
    # The fingerprint of the tokenizer.
    tokenizer: str | None
    # The inputs, as recorded in the manifest.
    sources: list[dict[str, object]]
    shown: list[Shown]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def describe(self) -> str:
        """Return the human-readable report: figures, a histogram of lengths, and the beginnings of a few documents."""
        kind = "corpus" if self.has_manifest else "no manifest"
        sentences = (
            f" in {self.sequences:,} sequences" if self.sequences != self.documents - self.empty_documents else ""
        )
        lines = [
            f"{self.path}  ({kind}, {self.shards:,} shard{'s' if self.shards != 1 else ''}, {self.bytes:,} bytes)",
            f"documents    {self.documents:,}{sentences}"
            + (f", {self.empty_documents:,} empty" if self.empty_documents else ""),
            f"tokens       {self.tokens:,} as {self.dtype}",
            f"vocabulary   {self._vocabulary()}",
            f"duplicates   {self.duplicates.describe()}",
            f"length       mean {self.mean_length:,.1f}, shortest {self.shortest:,}, longest {self.longest:,} tokens",
            "percentiles  " + "  ".join(f"{name} {value:,}" for name, value in self.percentiles.items()),
            *self._sources(),
            "",
            "tokens per document",
            draw(self.histogram),
        ]
        for shown in self.shown:
            lines += ["", f"document {shown.document:,} ({shown.tokens:,} tokens)", "  " + printable(shown.text)]
        return "\n".join(lines)

    def _sources(self) -> list[str]:
        """Return one line for each of the first inputs, with the version it had."""
        lines = [
            f"{source['path']}  {source['bytes']:,} bytes, {source['version'] or 'version not kept'}"
            for source in self.sources[:_SHOWN_SOURCES]
        ]
        if len(self.sources) > _SHOWN_SOURCES:
            lines.append(f"and {len(self.sources) - _SHOWN_SOURCES:,} more: --json lists them")
        return [f"{'' if number else 'made from':<13}{line}" for number, line in enumerate(lines)]

    def _vocabulary(self) -> str:
        seen = self.vocabulary
        where = "all tokens" if seen.sampled_tokens == self.tokens else f"{seen.sampled_tokens:,} sampled tokens"
        text = f"ids {seen.smallest:,} to {seen.largest:,}, {seen.distinct:,} distinct in {where}"
        if seen.promised_largest is not None and seen.promised_largest != seen.largest:
            text += f"; largest of all {seen.promised_largest:,}"
        return text + (f"; the tokenizer has {seen.tokenizer_size:,}" if seen.tokenizer_size is not None else "")


def inspect(path: Path, *, tokenizer: str | None = None, sample: int = 20_000, show: int = 3) -> CorpusFacts:
    """Collect statistics of the corpus or pair at `path`.

    Args:
        path: The corpus directory, or the prefix of a pair.
        tokenizer: The tokenizer that decodes the shown documents. None: the one stored with the corpus.
        sample: The number of documents to hash for the estimate of duplicates.
        show: The number of documents to show.
    """
    corpus = open_pairs(path)
    try:
        return _facts(corpus, _tokenizer_of(corpus, tokenizer), sample, show)
    finally:
        for shard in corpus.shards:
            shard.close()


def _facts(corpus: Corpus, tokenizer: Tokenizer | None, sample: int, show: int) -> CorpusFacts:
    counts = count_lengths(corpus.shards)
    manifest = corpus.manifest
    return CorpusFacts(
        path=str(corpus.path),
        has_manifest=manifest is not None,
        shards=len(corpus.shards),
        documents=corpus.documents,
        empty_documents=_empty(counts),
        sequences=sum(shard.sequences for shard in corpus.shards),
        tokens=corpus.tokens,
        bytes=sum(shard.tokens * shard.dtype.itemsize for shard in corpus.shards),
        dtype="/".join(sorted({shard.dtype.name for shard in corpus.shards})),
        mean_length=round(counts.mean, 3),
        shortest=counts.percentile(0),
        longest=counts.percentile(100),
        percentiles={f"p{percent}": counts.percentile(percent) for percent in PERCENTILES},
        histogram=counts.histogram(),
        vocabulary=_vocabulary(corpus, tokenizer),
        duplicates=estimate_duplicates(corpus, counts, sample=sample),
        tokenizer=tokenizer.fingerprint if tokenizer else manifest.tokenizer.fingerprint if manifest else None,
        sources=[source.model_dump() for source in manifest.sources] if manifest else [],
        shown=_show(corpus, tokenizer, show) if tokenizer else [],
    )


def _empty(counts: LengthCounts) -> int:
    return int(counts.documents[0]) if counts.total and counts.lengths[0] == 0 else 0


def _vocabulary(corpus: Corpus, tokenizer: Tokenizer | None) -> Vocabulary:
    manifest = corpus.manifest
    run = min(_RUN_TOKENS, corpus.tokens)
    if corpus.tokens <= _SAMPLE_RUNS * _RUN_TOKENS:
        starts = list(range(0, corpus.tokens, run)) if run else []
    else:
        starts = [int(at) for at in np.linspace(0, corpus.tokens - run, _SAMPLE_RUNS)]
    ids = np.zeros(0, np.int64)
    sampled = 0
    for start in starts:
        tokens = corpus.read(start, min(run, corpus.tokens - start))
        ids, sampled = np.union1d(ids, np.unique(tokens).astype(np.int64)), sampled + len(tokens)
    size = tokenizer.vocab_size if tokenizer else manifest.tokenizer.vocab_size if manifest else None
    return Vocabulary(
        sampled_tokens=sampled,
        smallest=int(ids[0]) if len(ids) else 0,
        largest=int(ids[-1]) if len(ids) else 0,
        distinct=len(ids),
        promised_largest=corpus.max_token() if manifest else None,
        tokenizer_size=size,
    )


def _tokenizer_of(corpus: Corpus, given: str | None) -> Tokenizer | None:
    """Load the given tokenizer, which must be the one of the corpus, or else the one stored with the corpus, if any."""
    if given is None:
        return None if corpus.manifest is None else load_tokenizer(str(corpus.path / corpus.manifest.tokenizer.file))
    tokenizer = load_tokenizer(given)
    if corpus.manifest is not None and corpus.manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ArgosyError(
            "tokenizer.mismatch",
            f"{corpus.path} was prepared with tokenizer {corpus.manifest.tokenizer.fingerprint[:12]}, this one is "
            f"{tokenizer.fingerprint[:12]}: the text shown would be wrong",
            key="--tokenizer",
            value=given,
            fix="leave --tokenizer out: the right one is stored with the corpus",
        )
    return tokenizer


def _show(corpus: Corpus, tokenizer: Tokenizer, show: int) -> list[Shown]:
    """Return the beginnings of `show` documents, spread evenly over the corpus."""
    picked = sorted({int(at) for at in np.linspace(0, corpus.documents - 1, show)}) if corpus.documents else []
    shown: list[Shown] = []
    first_document = first_token = 0
    for shard in corpus.shards:
        for document in picked:
            if 0 <= document - first_document < shard.documents:
                start = shard.token_at_document(document - first_document)
                tokens = shard.token_at_document(document - first_document + 1) - start
                ids = corpus.read(first_token + start, min(tokens, _SHOWN_TOKENS)).tolist() if tokens else []
                known = [i for i in ids if 0 <= i < tokenizer.vocab_size]
                shown.append(Shown(document, tokens, tokenizer.decode(known)[:_SHOWN_CHARACTERS]))
        first_document, first_token = first_document + shard.documents, first_token + shard.tokens
    return shown


def printable(text: str) -> str:
    """Escape line ends and control characters in untrusted text, so that a terminal shows them instead of obeying them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

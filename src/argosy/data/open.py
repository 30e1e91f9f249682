"""Open the data of a run spec: corpora, tokenizer and splits, with every check that needs the files.

All refusals happen here, before a model is built or a device is allocated: missing or truncated files, a tokenizer other
than the one that prepared the data, ids beyond the model's vocabulary, splits too small for one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from argosy.config.schema import DataSource, FimSpec, RunSpec
from argosy.data.corpus.corpus import Corpus, Split, open_corpus
from argosy.data.samples.fim import FillInTheMiddle
from argosy.data.samples.megatron_stream import MegatronStream, split_by_sequence
from argosy.data.samples.windows import BatchMaker, SampleStream, Stream, Windows
from argosy.data.tasks import Tasks
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class RunData:
    """The opened corpora of a run, from which sample streams are built, one for each split."""

    spec: RunSpec
    corpora: list[Corpus]
    # None for a bare Megatron pair without data.tokenizer, which is enough to train but not to sample.
    tokenizer: Tokenizer | None

    def training(self) -> Stream:
        """Return the stream of the training split, blended by the weights of the run spec, in the order of `data.order`."""
        weights = [source.weight for source in self.spec.data.train if source.weight is not None]
        if self.spec.data.order == "megatron":
            return self._megatron("train", self.corpora, weights or None, self._training_samples(), fim=True)
        return self._stream("train", self.corpora, weights or None, fim=True)

    def split(self, corpus: Corpus, name: str) -> Split:
        """Return one split of a corpus. No token belongs to two splits."""
        shares = self.spec.data.split
        by_sequence = self.spec.data.order == "megatron"
        return (split_by_sequence(corpus, shares) if by_sequence else corpus.split(shares))[name]

    def whole(self, split: str) -> Stream:
        """Return a stream of all corpora without weights: its first `epoch_samples` samples are every sample once."""
        return self._stream(split, self.corpora, None, fim=False)

    def each(self, split: str) -> dict[str, Stream]:
        """Return one stream per source, by name, so that evaluation can report a loss for each source."""
        names = set_names([source.path for source in self.spec.data.train])
        return {
            name: self._stream(split, [corpus], None, fim=False)
            for name, corpus in zip(names, self.corpora, strict=True)
        }

    @property
    def target_len(self) -> int | None:
        """The decoder sequence length of an encoder-decoder sample, else None."""
        t5 = self.spec.data.t5
        return None if t5 is None else Tasks(self.spec, self.tokenizer, self._eod_id()).span_corruption(t5).target_len

    def facts(self) -> dict[str, Any]:
        """Return what a run records about its data: the identity of each corpus, and the end-of-document id."""
        return {"corpora": [corpus.facts() for corpus in self.corpora], "eod_id": self._eod_id()}

    def _stream(self, split: str, corpora: list[Corpus], weights: list[float] | None, *, fim: bool) -> Stream:
        """Return a stream of the sample type that the model is trained on."""
        data, tasks = self.spec.data, Tasks(self.spec, self.tokenizer, self._eod_id())
        if self.spec.model.samples == "t5":
            return tasks.spans(split, corpora, weights)
        if self.spec.model.samples in ("bert", "ict"):
            return tasks.documents(split, corpora, weights)
        if data.order == "megatron":
            return self._megatron(split, corpora, None, None, fim=fim)
        sets = [Windows(corpus, self.split(corpus, split), data.seq_len) for corpus in corpora]
        return SampleStream(sets, weights, self.spec.train.seed, self._maker(fim=fim))

    def _megatron(
        self, split: str, corpora: list[Corpus], weights: list[float] | None, num_samples: int | None, *, fim: bool
    ) -> MegatronStream:
        """Return `num_samples` samples in Megatron's order, or one epoch of each corpus if that is None."""
        data = self.spec.data
        return MegatronStream(
            corpora,
            data.split,
            weights,
            seq_len=data.seq_len,
            num_samples=num_samples,
            seed=self.spec.train.seed,
            maker=self._maker(fim=fim),
            split=split,
            cache_dir=None if data.order_cache is None else Path(data.order_cache),
        )

    def _training_samples(self) -> int:
        """Return the number of samples in the whole run. Megatron's order depends on it."""
        data, train = self.spec.data, self.spec.train
        epoch = sum(max(0, self.split(corpus, "train").tokens - 1) // data.seq_len for corpus in self.corpora)
        return train.batches.samples(train.length.steps(train.batches, seq_len=data.seq_len, epoch_samples=epoch) or 0)

    def _maker(self, *, fim: bool) -> BatchMaker:
        data = self.spec.data
        eod = self._eod_id()
        needs = [key for key in ("mask_eod", "document_mask", "reset_positions", "fim") if getattr(data, key)]
        if eod is None and needs:
            raise ArgosyError(
                "tokenizer.no-eod",
                "document boundaries are unknown: the data was prepared without an end-of-document token",
                key=f"data.{needs[0]}",
                fix="prepare the data with --append-eod, or leave the key out",
            )
        return BatchMaker(
            vocab_size=self.spec.model.vocab_size,
            seed=self.spec.train.seed,
            fim=self._fill_in_the_middle(data.fim, eod) if fim and data.fim is not None and eod is not None else None,
            masked_eod=eod if data.mask_eod else None,
            parting_eod=eod if data.document_mask else None,
            restarting_eod=eod if data.reset_positions else None,
        )

    def _fill_in_the_middle(self, fim: FimSpec, eod: int) -> FillInTheMiddle:
        ids = {}
        for role in ("prefix", "middle", "suffix"):
            found = None if self.tokenizer is None else self.tokenizer.id_of(getattr(fim, role))
            if found is None or found >= self.spec.model.vocab_size:
                raise ArgosyError(
                    "tokenizer.vocabulary",
                    f"the tokenizer has no token {getattr(fim, role)!r}, or its id is beyond the model's vocabulary",
                    key=f"data.fim.{role}",
                    value=getattr(fim, role),
                    fix="name three special tokens of the tokenizer",
                )
            ids[role] = found
        return FillInTheMiddle(**ids, eod=eod, rate=fim.rate, spm_rate=fim.spm_rate)

    def _eod_id(self) -> int | None:
        for corpus in self.corpora:
            if corpus.manifest is not None:
                return corpus.manifest.tokenizer.eod_id
        try:
            return None if self.tokenizer is None else self.tokenizer.eod_id
        except ArgosyError:
            return None


def open_data(spec: RunSpec) -> RunData:
    """Open all corpora and the tokenizer of a run spec, and check them against each other and the model."""
    corpora = [_open_source(source) for source in spec.data.train]
    data = RunData(spec, corpora, _tokenizer(spec, corpora))
    _check_vocabulary(spec, data)
    return data


def set_names(paths: Sequence[str]) -> list[str]:
    """Return a short unique name per source for metrics: the last path component, with -2, -3, … for repeated names."""
    names: list[str] = []
    for path in paths:
        last = PurePosixPath(path.partition("://")[2] or path).name or path
        name = last.removesuffix(".bin").removesuffix(".idx")
        number = 1
        while (unique := name if number == 1 else f"{name}-{number}") in names:
            number += 1
        names.append(unique)
    return names


def _open_source(source: DataSource) -> Corpus:
    if source.cache is None:
        return open_corpus(Path(source.path))
    # Imported late: it needs fsspec, which local data does not.
    from argosy.data.remote.stream import open_streamed

    return open_streamed(source.path, Path(source.cache), source.cache_limit)


def _tokenizer(spec: RunSpec, corpora: list[Corpus]) -> Tokenizer | None:
    """Return the run's tokenizer. Refuse one whose fingerprint differs from that of a prepared corpus."""
    chosen = load_tokenizer(spec.data.tokenizer) if spec.data.tokenizer is not None else None
    for corpus in corpora:
        if corpus.manifest is None:
            continue
        facts = corpus.manifest.tokenizer
        if chosen is None:
            chosen = load_tokenizer(str(corpus.path / facts.file))
        if chosen.fingerprint != facts.fingerprint:
            raise ArgosyError(
                "tokenizer.mismatch",
                f"{corpus.path} was prepared with tokenizer {facts.fingerprint[:12]} ({facts.vocab_size:,} entries), "
                f"but the run uses {chosen.fingerprint[:12]} ({chosen.vocab_size:,} entries)",
                key="data.tokenizer",
                value=spec.data.tokenizer,
                fix="leave data.tokenizer out to use the one stored with the data, or prepare the data again",
            )
    return chosen


def _check_vocabulary(spec: RunSpec, data: RunData) -> None:
    rows = spec.model.vocab_size
    if data.tokenizer is not None and data.tokenizer.vocab_size > rows:
        raise ArgosyError(
            "tokenizer.vocabulary",
            f"the tokenizer has {data.tokenizer.vocab_size:,} entries, the model's vocabulary {rows:,}",
            key="model.vocab_size",
            value=rows,
            fix=f"model.vocab_size={data.tokenizer.vocab_size}",
        )
    for corpus in data.corpora:
        if (largest := corpus.max_token()) >= rows:
            raise ArgosyError(
                "tokenizer.vocabulary",
                f"{corpus.path} holds token id {largest:,}; the model's vocabulary of {rows:,} ends at {rows - 1:,}",
                key="model.vocab_size",
                value=rows,
                fix=f"model.vocab_size={largest + 1} or more, or prepare the data with the model's tokenizer",
            )

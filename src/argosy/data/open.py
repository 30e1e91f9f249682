"""Open the data of a run spec: corpora, tokenizer and splits, with every check that needs the files.

All refusals happen here, before a model is built or a device is allocated: missing or truncated files, a tokenizer other
than the one that prepared the data, ids beyond the model's vocabulary, splits too small for one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from argosy.config.schema import DataSource, RunSpec
from argosy.console.formats import amount
from argosy.data.corpus.corpus import Corpus, Split, open_corpus
from argosy.data.corpus.corpus_manifest import FILE_NAME
from argosy.data.samples.megatron_stream import split_by_sequence
from argosy.data.samples.windows import Stream
from argosy.data.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from argosy.errors import ArgosyError
from argosy.files import local_path
from argosy.tasks.task import Opened
from argosy.tasks.task_registry import task_of

# The ids in use are counted in about _COUNT_BLOCKS blocks of _COUNT_TOKENS tokens, which takes 0.3 s if few of them occur.
_COUNT_TOKENS = 1 << 20
_COUNT_BLOCKS = 32


@dataclass(frozen=True)
class RunData:
    """The opened corpora of a run, from which sample streams are built, one for each split."""

    spec: RunSpec
    corpora: list[Corpus]
    # None for a bare Megatron pair without data.tokenizer, which is enough to train but not to sample.
    tokenizer: Tokenizer | None
    # Corpora of their own for the validation split. Empty: a share of `corpora`.
    validation: list[Corpus] = field(default_factory=list)

    def training(self) -> Stream:
        """Return the stream of the training split, blended by the weights of the run spec, in the order of `data.order`."""
        weights = [source.weight for source in self.spec.data.train if source.weight is not None]
        return self._stream("train", self.corpora, weights or None, training=True)

    def split(self, corpus: Corpus, name: str) -> Split:
        """Return one split of a corpus. No token belongs to two splits."""
        shares = self.spec.data.split
        by_sequence = self.spec.data.order == "megatron"
        return (split_by_sequence(corpus, shares) if by_sequence else corpus.split(shares))[name]

    def whole(self, split: str) -> Stream:
        """Return a stream of all corpora without weights: its first `epoch_samples` samples are every sample once."""
        return self._evaluated(split, self._own(split) or self.corpora)

    def each(self, split: str) -> dict[str, Stream]:
        """Return one stream per source, by name, so that evaluation can report a loss for each source."""
        own, data = self._own(split), self.spec.data
        names = set_names([source.path for source in (data.validation if own else data.train)])
        return {name: self._evaluated(split, [corpus]) for name, corpus in zip(names, own or self.corpora, strict=True)}

    def _own(self, split: str) -> list[Corpus]:
        return self.validation if split == "validation" else []

    def _evaluated(self, split: str, corpora: list[Corpus]) -> Stream:
        if not self._own(split):
            return self._stream(split, corpora, None, training=False)
        # All of a validation corpus belongs to its split.
        data = self.spec.data.model_copy(update={"split": (1.0, 0.0, 0.0)})
        whole = replace(self, spec=self.spec.model_copy(update={"data": data}))
        return whole._stream("train", corpora, None, training=False)

    @property
    def target_len(self) -> int | None:
        """The decoder sequence length of an encoder-decoder sample, else None."""
        return task_of(self.spec).target_len(self.spec)

    @cached_property
    def largest_tokens(self) -> list[int]:
        """The largest token id of each corpus, those of validation last."""
        return [corpus.max_token() for corpus in (*self.corpora, *self.validation)]

    def unused_vocabulary(self) -> str | None:
        """Describe a vocabulary of which the corpora use less than half, and what to do about it; else None.

        The largest id alone does not show it if that is the end-of-document token, as GPT-2's is, so ids are counted as well.
        """
        model = self.spec.model
        used, rows = max(self.largest_tokens) + 1, model.vocab_size
        if 2 * used > rows:
            return self._unused_ids()
        entries = max(used, 0 if self.tokenizer is None else self.tokenizer.vocab_size)
        fix = f"model.vocab_size={entries} leaves them out" if 2 * entries <= rows else _smaller_tokenizer(used, rows)
        if fix is None:
            return None
        return (
            f"the data has token ids below {used:,}, and the vocabulary {rows:,} rows: {self._idle(used)} parameters are of tokens that "
            f"never occur; {fix}"
        )

    def _unused_ids(self) -> str | None:
        """Describe a vocabulary of which less than half occurs in the corpora, if their tokens are here to be counted."""
        corpora, rows = (*self.corpora, *self.validation), self.spec.model.vocab_size
        # Remote tokens would have to be downloaded.
        if _smaller_tokenizer(0, rows) is None or any(corpus.is_remote for corpus in corpora):
            return None
        seen, read, used = np.zeros(rows, bool), 0, 0
        for corpus in corpora:
            for block in corpus.blocks(_COUNT_TOKENS, max(1, _COUNT_BLOCKS // len(corpora))):
                # A bare pair may hold other ids; they are refused in a batch.
                seen[block[(block >= 0) & (block < rows)]] = True
                read += len(block)
                used = int(seen.sum())
                if 2 * used > rows:
                    return None
        whole = read == sum(corpus.tokens for corpus in corpora)
        data = "the data uses" if whole else f"{amount(read)} tokens of the data, read at even distances, use"
        never = "that never occur" if whole else "that do not occur in them"
        return (
            f"{data} {used:,} of the {rows:,} ids of the vocabulary: {self._idle(used)} parameters are of tokens {never}; "
            f"{_smaller_tokenizer(used, rows)}"
        )

    def _idle(self, used: int) -> str:
        """Return the number of parameters of the rows beyond `used`, in words."""
        model = self.spec.model
        return amount((model.vocab_size - used) * model.hidden * (1 if model.tied else 2))

    def facts(self) -> dict[str, Any]:
        """Return what a run records about its data: the identity of each corpus, and the end-of-document id."""
        task = task_of(self.spec)
        corpora, validation = (
            [corpus.facts() | task.corpus_facts(corpus) for corpus in some] for some in (self.corpora, self.validation)
        )
        facts: dict[str, Any] = {"corpora": corpora, "eod_id": self.eod_id}
        return facts | ({"validation": validation} if validation else {})

    def _stream(self, split: str, corpora: list[Corpus], weights: list[float] | None, *, training: bool) -> Stream:
        """Return a stream of the samples of the run's task."""
        opened = Opened(self.spec, self.tokenizer, self.eod_id)
        return task_of(self.spec).stream(opened, split, corpora, weights, training=training)

    def require_tokenizer(self, key: str) -> Tokenizer:
        """Return the tokenizer, or refuse `key`, which needs one."""
        if self.tokenizer is None:
            raise ArgosyError(
                "tokenizer.not-found",
                f"{key} needs a tokenizer, and a bare .bin/.idx pair has none",
                key=key,
                fix=f"name it: data.tokenizer=tokenizer.json; or leave {key} out",
            )
        return self.tokenizer

    @property
    def chat_template(self) -> Path | None:
        """The chat template that the conversations were prepared with, if the data are conversations."""
        chats = ((corpus.path, corpus.manifest.chat) for corpus in self.corpora if corpus.manifest is not None)
        return next((path / chat.file for path, chat in chats if chat is not None), None)

    @property
    def eod_id(self) -> int | None:
        """The id of the end-of-document token, None if it is unknown."""
        for corpus in self.corpora:
            if corpus.manifest is not None:
                return corpus.manifest.tokenizer.eod_id
        try:
            return None if self.tokenizer is None else self.tokenizer.eod_id
        except ArgosyError:
            return None


def open_data(spec: RunSpec) -> RunData:
    """Open all corpora and the tokenizer of a run spec, and check them against each other and the model."""
    _require_built(spec)
    corpora = [_open_source(source) for source in spec.data.train]
    validation = [_open_source(source) for source in spec.data.validation]
    data = RunData(spec, corpora, _tokenizer(spec, [*corpora, *validation]), validation)
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


def _require_built(spec: RunSpec) -> None:
    """Refuse a corpus that does not exist yet, if the run spec has a recipe for it: `open_corpus` cannot know of the recipe."""
    for place, source in spec.data.sources.items():
        path = local_path(source.path)
        # A Megatron pair may be in its place.
        if source.prepare is None or (path / FILE_NAME).exists() or path.with_name(f"{path.name}.idx").exists():
            continue
        launched = "" if spec.cluster is None else "; `argosy launch RUN.yaml` makes it in the stages before training"
        raise ArgosyError(
            "data.not-found",
            f"{source.path} is not made yet; the run spec says how ({place}.prepare)",
            key=f"{place}.path",
            value=source.path,
            fix=f"`argosy data build RUN.yaml` makes it here, or goes on with it{launched}",
        )


def _open_source(source: DataSource) -> Corpus:
    if source.cache is None:
        return open_corpus(Path(source.path))
    # Imported late: it needs fsspec, which local data does not.
    from argosy.data.remote.stream import open_streamed

    return open_streamed(source.path, Path(source.cache), source.cache_limit)


def _smaller_tokenizer(used: int, rows: int) -> str | None:
    """Return how to get a tokenizer with `used` entries, None if even the smallest one, of bytes, has more than half of `rows`."""
    entries = max(used, ByteTokenizer.vocab_size)
    if 2 * entries > rows:
        return None
    return f"a smaller tokenizer, by `argosy data train-tokenizer --vocab-size {entries}` or less, needs none of them"


def _tokenizer(spec: RunSpec, corpora: list[Corpus]) -> Tokenizer | None:
    """Return the run's tokenizer. Refuse one whose fingerprint differs from that of a prepared corpus."""
    named, first = spec.data.tokenizer, None
    special = task_of(spec).special_in_text
    chosen = None if named is None else load_tokenizer(named, special_in_text=special)
    for corpus in corpora:
        if corpus.manifest is None:
            continue
        facts = corpus.manifest.tokenizer
        if chosen is None:
            named, first = str(corpus.path / facts.file), corpus
            chosen = load_tokenizer(named, special_in_text=special)
        if chosen.fingerprint != facts.fingerprint:
            other = "the run uses" if first is None else f"{first.path} with"
            raise ArgosyError(
                "tokenizer.mismatch",
                f"{corpus.path} was prepared with tokenizer {facts.fingerprint[:12]} ({facts.vocab_size:,} entries), "
                f"but {other} {chosen.fingerprint[:12]} ({chosen.vocab_size:,} entries)",
                key="data.tokenizer",
                value=spec.data.tokenizer,
                fix=("" if first is not None else "leave data.tokenizer out to use the one stored with the data; or ")
                + f"prepare {corpus.path} again: argosy data prepare TEXT --tokenizer {named} --output DIR",
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
    for corpus, largest in zip((*data.corpora, *data.validation), data.largest_tokens, strict=True):
        if largest >= rows:
            raise ArgosyError(
                "tokenizer.vocabulary",
                f"{corpus.path} holds token id {largest:,}; the model's vocabulary of {rows:,} ends at {rows - 1:,}",
                key="model.vocab_size",
                value=rows,
                fix=f"model.vocab_size={largest + 1} or more, or prepare the data with the model's tokenizer",
            )

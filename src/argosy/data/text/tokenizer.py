"""Tokenizers: Hugging Face `tokenizer.json`, GPT-2's `vocab.json` + `merges.txt`, SentencePiece models, and plain bytes.

By default text in a document never becomes a special token: `<|endoftext|>` in a text is encoded as plain characters, and
`prepare` appends the end-of-document id. Prepared data carries a fingerprint of everything that determines the ids, so a run
with another tokenizer is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import orjson

from argosy.data.text.hub_names import PREFIX, as_path, on_hub
from argosy.data.text.inputs import require
from argosy.errors import ArgosyError
from argosy.files import local_path
from argosy.untrusted import MIB, read_object, read_regular

# The size limit of a tokenizer file. The largest published ones have 40 MiB.
LARGEST_TOKENIZER = 512 * MIB
Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]
# The ids of a text, and the range of its characters that each came from.
Placed = tuple[Ids, npt.NDArray[np.int64]]  # [ids], [ids, 2]
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>", "[EOS]", "[SEP]")
_DECIDES_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


class Tokenizer(Protocol):
    """The interface of all tokenizers."""

    @property
    def vocab_size(self) -> int:
        """The number of embedding rows that the ids need: the largest id + 1."""

    @property
    def eod_id(self) -> int:
        """The id of the end-of-document token."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the ids. Prepared data carries it."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Return the ids of all texts in one flat array, and the number of ids of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Unknown ids are skipped: a padded embedding has rows beyond the vocabulary."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary does not have it."""

    def opening(self) -> list[int]:
        """Return the special tokens that the tokenizer itself puts before a text, such as Llama's BOS. `prepare` adds none."""

    def stored(self) -> tuple[str, bytes]:
        """Return (file name, content) to store with data and checkpoints. `load_tokenizer` reads it back."""


@runtime_checkable
class PlacesTokens(Protocol):
    """A tokenizer that knows which characters each token came from."""

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return the ids of each text, and the range of characters of each id."""


class _EncodesText:
    """Encodes one text with the batch form of a tokenizer."""

    def encode(self: Tokenizer, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]


class ByteTokenizer(_EncodesText):
    """A tokenizer without a file: ids 0..255 are the UTF-8 bytes, and 256 is the end of a document."""

    vocab_size = 257
    eod_id = 256
    fingerprint = "bytes-v1"

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
        return ids, np.array([len(text) for text in encoded], np.int64)

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        characters = [np.repeat(np.arange(len(text)), [len(c.encode()) for c in text]) for text in texts]
        return [
            (np.frombuffer(text.encode(), np.uint8).astype(np.uint32), np.stack((at, at + 1), axis=1))
            for text, at in zip(texts, characters, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def id_of(self, token: str) -> int | None:
        return None

    def opening(self) -> list[int]:
        return []

    def stored(self) -> tuple[str, bytes]:
        return "tokenizer.json", json.dumps({"type": self.fingerprint}).encode()


class JsonTokenizer(_EncodesText):
    """A Hugging Face tokenizer.json, run by the `tokenizers` library. It is the reference for the fast engines."""

    def __init__(self, text: str, name: str, eod: str | None = None, *, special_in_text: bool = False) -> None:
        from tokenizers import Tokenizer as Engine

        try:
            with panics_as_errors():
                self._engine = Engine.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ArgosyError(
                "tokenizer.not-found",
                f"{name} is not a tokenizer.json: {error}",
                fix="give a Hugging Face tokenizer.json",
            ) from None
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = not special_in_text
        self.text, self.name, self.eod, self.special_in_text = text, name, eod, special_in_text
        # The number of embedding rows: the largest id + 1, not the number of entries, because ids may have gaps.
        self.vocab_size = max(self._engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        return _fingerprint(json.loads(self.text))

    @property
    def eod_id(self) -> int:
        names = (self.eod,) if self.eod else EOD_NAMES
        for name in names:
            found = self._engine.token_to_id(name)
            if found is not None:
                return int(found)
        special = [t.content for t in self._engine.get_added_tokens_decoder().values() if t.special]
        raise ArgosyError(
            "tokenizer.no-eod",
            f"{self.name} has none of {', '.join(names)}",
            key="--eod",
            value=self.eod,
            fix=f"name it with --eod; its special tokens are: {', '.join(special) or 'none'}; or --no-append-eod",
        )

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        with tokenizer_faults(self.name):
            encoded = [item.ids for item in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        return _flat(encoded)

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        with tokenizer_faults(self.name):
            found = self._engine.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(one.ids, np.uint32), np.array(one.offsets, np.int64).reshape(len(one.ids), 2)) for one in found
        ]

    def decode(self, ids: Iterable[int]) -> str:
        with tokenizer_faults(self.name):
            return str(self._engine.decode([int(i) for i in ids], skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        found = self._engine.token_to_id(token)
        return None if found is None else int(found)

    def opening(self) -> list[int]:
        with tokenizer_faults(self.name):
            encoded = self._engine.encode("a")
        front = [*encoded.special_tokens_mask, 0].index(0)
        return [int(i) for i in encoded.ids[:front]]

    def stored(self) -> tuple[str, bytes]:
        return "tokenizer.json", self.text.encode()


@contextmanager
def tokenizer_faults(name: str) -> Iterator[None]:
    """Convert any exception of a tokenizer library into a `tokenizer.failed` error that names the tokenizer."""
    try:
        with panics_as_errors():
            yield
    except Exception as error:  # noqa: BLE001 - the libraries raise nothing narrower
        slow = "retry-limit" in str(error)
        why = "; a pattern in its pre_tokenizer or normalizer takes exponential time (backtracking)" if slow else ""
        raise ArgosyError(
            "tokenizer.failed",
            f"{name} fails on a text: {error}{why}",
            key="tokenizer",
            value=name,
            fix="use another tokenizer, or rewrite the pattern without nested repetition, such as (a+)+"
            if slow
            else "use another tokenizer, or leave the text out",
        ) from None


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Convert a Rust panic (pyo3's PanicException) into a RuntimeError. It is not an `Exception` and would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(str(error)) from None


class SentencePieceTokenizer(_EncodesText):
    """A SentencePiece `.model`, run by the `sentencepiece` library."""

    def __init__(self, model: bytes, name: str) -> None:
        sentencepiece = require("sentencepiece", "data", "a SentencePiece tokenizer")
        try:
            self._engine = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ArgosyError(
                "tokenizer.not-found", f"{name} is not a SentencePiece model: {error}", fix="give a .model file"
            ) from None
        self._model, self._name = model, name
        self.fingerprint = hashlib.sha256(model).hexdigest()

    @property
    def vocab_size(self) -> int:
        return int(self._engine.vocab_size())

    @property
    def eod_id(self) -> int:
        if self._engine.eos_id() < 0:
            raise ArgosyError(
                "tokenizer.no-eod", f"{self._name} has no end-of-sentence piece", fix="use --no-append-eod"
            )
        return int(self._engine.eos_id())

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return _flat(self._engine.encode(list(texts), out_type=int))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._engine.decode([int(i) for i in ids if i < self.vocab_size]))

    def id_of(self, token: str) -> int | None:
        found = int(self._engine.piece_to_id(token))
        return None if found == self._engine.unk_id() else found

    def opening(self) -> list[int]:
        return []

    def stored(self) -> tuple[str, bytes]:
        return "tokenizer.model", self._model


def load_tokenizer(
    name: str, eod: str | None = None, *, special_in_text: bool = False, within: Path | None = None
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: `bytes`, a tokenizer.json, a SentencePiece `.model`, a GPT-2 vocab.json beside its merges.txt, or a directory
            that holds one of them; `hf:NAME` for one that was fetched from the Hub.
        eod: The end-of-document token. None looks for the usual names.
        special_in_text: Encode the names of special tokens in a text as those tokens.
        within: The directory that links may not lead out of.

    Raises:
        ArgosyError: `tokenizer.not-found`, `tokenizer.no-eod`.
    """
    if name == "bytes":
        if eod is not None:
            raise ArgosyError(
                "tokenizer.no-eod",
                "the byte tokenizer has its own end-of-document id, 256",
                key="--eod",
                value=eod,
                fix="leave --eod out",
            )
        return ByteTokenizer()
    path = local_path(as_path(name) if name.startswith(PREFIX) else name)
    if path.is_dir():
        known = ("tokenizer.json", "tokenizer.model", "vocab.json")
        path = next((path / file for file in known if (path / file).exists()), path / known[0])
    try:
        content = read_regular(path, LARGEST_TOKENIZER, within=within)
        if path.suffix == ".model":
            return SentencePieceTokenizer(content, str(path))
        text = content.decode("utf-8")
        if path.name.endswith("vocab.json"):
            text = _from_vocabulary(path, within)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ArgosyError(
            "tokenizer.not-found",
            f"{path} cannot be read: {reason}",
            key="tokenizer",
            value=name,
            fix="give a tokenizer.json, a SentencePiece .model, a vocab.json beside its merges.txt, `bytes`, or hf:NAME of the Hub"
            if on_hub(name) is None
            else "`argosy data build RUN.yaml --only fetch` fetches it; the stage fetch of a launch does",
        ) from None
    if content == ByteTokenizer().stored()[1]:
        return ByteTokenizer()
    return JsonTokenizer(text, str(path), eod, special_in_text=special_in_text)


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE on `texts`. Return the content of a tokenizer.json, in which id 0 is the end of a document."""
    from tokenizers import pre_tokenizers, trainers

    engine = _byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return str(engine.to_str(pretty=True))


def _byte_level_bpe(**model: Any) -> Any:
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers

    engine = Engine(models.BPE(**model))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _from_vocabulary(vocab: Path, within: Path | None) -> str:
    """Convert GPT-2's vocab.json and merges.txt to a tokenizer.json."""
    merges = vocab.with_name(vocab.name.replace("vocab.json", "merges.txt"))
    try:
        entries = read_object(vocab, LARGEST_TOKENIZER, within=within)
    except orjson.JSONDecodeError as error:
        raise _not_a_vocabulary(vocab, str(error)) from None
    lines = read_regular(merges, LARGEST_TOKENIZER, within=within).decode("utf-8").splitlines()
    pairs = [
        (left, right)
        for line in lines
        if not line.startswith("#version")
        for left, _, right in [line.partition(" ")]
        if right
    ]
    try:
        with panics_as_errors():
            engine = _byte_level_bpe(vocab=entries, merges=pairs)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise _not_a_vocabulary(vocab, str(error)) from None
    engine.add_special_tokens([name for name in EOD_NAMES if name in entries])
    return str(engine.to_str())


def _not_a_vocabulary(vocab: Path, why: str) -> ArgosyError:
    return ArgosyError(
        "tokenizer.not-found",
        f"{vocab} and the merges.txt beside it are not a BPE vocabulary: {why}",
        fix="copy both files again, or give a tokenizer.json",
    )


def _flat(encoded: Sequence[Sequence[int]]) -> tuple[Ids, Lengths]:
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    ids = np.fromiter((i for text in encoded for i in text), np.uint32, int(lengths.sum()))
    return ids, lengths


def _fingerprint(document: dict[str, Any]) -> str:
    """Return a hash of the sections that determine ids. Padding, truncation, post-processor and decoder are not part of it."""
    parts = {key: document.get(key) for key in _DECIDES_IDS}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()

"""Tokenizers: Hugging Face `tokenizer.json` files, and plain bytes.

Text in a document never becomes a control token: `<|endoftext|>` written by an author is encoded as the characters it
is. The end-of-document id is appended by us. A fingerprint of everything that decides ids travels with prepared data,
so that a run with another tokenizer is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from argosy.errors import ArgosyError

Ids = npt.NDArray[np.int32]
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>", "[EOS]", "[SEP]")
_DECIDES_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def to_json(self) -> str:
        """The tokenizer.json to store beside data and checkpoints; `load_tokenizer` reads it back."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document. Needs no file and no training."""

    vocab_size = 257
    eod_id = 256
    fingerprint = "bytes-v1"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"type": self.fingerprint}) + "\n"


class JsonTokenizer:
    """A Hugging Face tokenizer.json, run by the `tokenizers` library."""

    def __init__(self, text: str, name: str, eod: str | None = None) -> None:
        from tokenizers import Tokenizer as Engine

        try:
            self._engine = Engine.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ArgosyError(
                "tokenizer.not-found",
                f"{name} is not a tokenizer.json: {error}",
                fix="give a Hugging Face tokenizer.json",
            ) from None
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        self._text, self._name, self._eod = text, name, eod
        self.fingerprint = _fingerprint(json.loads(text))

    @property
    def vocab_size(self) -> int:
        return int(self._engine.get_vocab_size(with_added_tokens=True))

    @property
    def eod_id(self) -> int:
        names = (self._eod,) if self._eod else EOD_NAMES
        for name in names:
            found = self._engine.token_to_id(name)
            if found is not None:
                return int(found)
        special = [t.content for t in self._engine.get_added_tokens_decoder().values() if t.special]
        raise ArgosyError(
            "tokenizer.no-eod",
            f"{self._name} has none of {', '.join(names)}",
            key="--eod",
            value=self._eod,
            fix=f"name it with --eod; its special tokens are: {', '.join(special) or 'none'}; or --no-append-eod",
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, np.int32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._engine.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        return self._text


def load_tokenizer(name: str, eod: str | None = None) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json or of a directory that holds one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ArgosyError(
            "tokenizer.not-found",
            f"{path} cannot be read: {reason}",
            key="tokenizer",
            value=name,
            fix="give a tokenizer.json, a directory that holds one, or `bytes`",
        ) from None
    if text == ByteTokenizer().to_json():
        return ByteTokenizer()
    return JsonTokenizer(text, str(path), eod)


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE trained on `texts`, as the text of a tokenizer.json. Ids 0 is the end of a document."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return str(engine.to_str(pretty=True))


def _fingerprint(document: dict[str, Any]) -> str:
    """Of what decides ids; not of padding, truncation or how ids are turned back into text."""
    parts = {key: document.get(key) for key in _DECIDES_IDS}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()

"""Fast tokenizer engines, used only if they give the same ids as the reference library `tokenizers`.

Every process that encodes checks this at start: engine and reference encode strings on which engines have failed before,
and a sample of the corpus. If one id differs, or an engine is not installed, the next engine or the reference is used, and
the report says why. Engines never parse JSON records; `records.py` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from argosy.data.text.tokenizer import Ids, JsonTokenizer, Lengths, Tokenizer, panics_as_errors, tokenizer_faults
from argosy.errors import ArgosyError

# Strings on which tokenizer engines have differed: leading white space before contractions, form feeds, control tokens as
# text, other scripts, digits, combining marks, emoji with joiners, long runs, zero-width characters, lone carriage returns.
NASTY = (
    "", " ", "  ", "\n", "\r\n\r\n", "\t\t x", "\n'main'", "\t'device", "\n'm", "\n't", "\t'd", "\n\n\x0c\n\n", "don't I'LL we'Re",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<s></s><unk>[CLS][SEP]", "é漢字かなкириллица", "e\u0301 \u1e69 ﬁ ½ ²",
    "👩‍👩‍👧‍👦 🏳️‍🌈", "\u200b\ufeff\u00a0\u3000x", "1234567890 ١٢٣ 12.5e-7", "x" * 3000, " " * 700 + "y", "ab" * 900,
    "def f(x):\n    return x**2  # ok\n\n\n\treturn", "http://a.b/c?d=e&f=%20#g", "\u0800\uffff\U0001f600\U0010ffff", "İıſßẞ",
)  # fmt: skip


Encode = Callable[[Sequence[str]], tuple[Ids, Lengths]]


def _fastokens(text: str, special_in_text: bool) -> Encode:
    # The work is already divided over processes, so threads would only compete for cores.
    for variable in ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS"):
        os.environ.setdefault(variable, "1")
    fastokens = importlib.import_module("fastokens")

    engine: Any = fastokens.Tokenizer.from_json_str(text)
    engine.no_truncation()
    engine.no_padding()

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids, offsets = engine.encode_batch_flat(list(texts), split_special_tokens=not special_in_text)
        ends: Lengths = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1]

    return encode


def _gigatoken(text: str, special_in_text: bool) -> Encode:
    gigatoken = importlib.import_module("gigatoken")

    # gigatoken matches every added token in the text, so remove the special tokens that must be encoded as plain text.
    if not special_in_text:
        document = orjson.loads(text)
        document["added_tokens"] = [token for token in document.get("added_tokens", ()) if not token["special"]]
        text = orjson.dumps(document).decode()
    engine: Any = gigatoken.Tokenizer.from_json(text)

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64)
        rows = engine.encode_batch(list(texts), parallel=False).layout
        ends: Lengths = np.asarray(rows.offsets.data)
        return np.asarray(rows.content.data)[ends[0] : ends[-1]], ends[1:] - ends[:-1]

    return encode


# Engines by module name, in order of preference. Both are about equally fast, and gigatoken takes longer to load.
ENGINES: dict[str, Callable[[str, bool], Encode]] = {"fastokens": _fastokens, "gigatoken": _gigatoken}


class EngineFault(Exception):
    """The reason why an engine cannot be used for this tokenizer, worded to follow the engine's name."""


def load_engine(name: str, tokenizer_json: str, special_in_text: bool) -> Encode:
    """Return the encode function of engine `name` for a tokenizer.json. Raise EngineFault if it cannot load it."""
    try:
        with panics_as_errors():
            encode = ENGINES[name](tokenizer_json, special_in_text)
    except Exception as error:
        raise EngineFault(f"cannot load this tokenizer ({error})") from error

    def guarded(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        with tokenizer_faults(name):
            return encode(texts)

    return guarded


@dataclass(frozen=True)
class Proof:
    """Test strings with their ids from the reference tokenizer, which an engine must reproduce."""

    texts: list[str]
    ids: Ids
    lengths: Lengths

    @classmethod
    def by(cls, reference: Tokenizer, sample: Sequence[str]) -> Proof:
        """Encode the hard strings and a sample of the corpus with the reference tokenizer."""
        texts = [*NASTY, *sample]
        return cls(texts, *reference.encode_batch(texts))

    def check(self, encode: Encode) -> None:
        """Raise EngineFault if `encode` fails or gives other ids than the reference."""
        try:
            ids, lengths = encode(self.texts)
        except ArgosyError as error:
            raise EngineFault(f"fails on hard strings ({error.cause})") from error
        if np.array_equal(lengths, self.lengths) and np.array_equal(ids, self.ids):
            return
        theirs, ours = (np.split(i, np.cumsum(n)[:-1]) for i, n in ((ids, lengths), (self.ids, self.lengths)))
        wrong = (text for text, a, b in zip(self.texts, theirs, ours, strict=False) if not np.array_equal(a, b))
        raise EngineFault(f"differs from the reference on {next(wrong, 'a batch of texts')[:40]!r}")


def likely_engine(tokenizer: Tokenizer) -> str | None:
    """Return the first engine that `choose_engine` will try, so that it can be loaded in advance."""
    names = (name for name in ENGINES if importlib.util.find_spec(name) is not None)
    return next(names, None) if isinstance(tokenizer, JsonTokenizer) else None


Proven = TypeVar("Proven")


def choose_engine(tokenizer: Tokenizer, prove: Callable[[str], Proven]) -> tuple[Proven | None, str]:
    """Choose the first engine that `prove` accepts.

    Args:
        tokenizer: The reference tokenizer.
        prove: A function that checks the engine of a given name. It raises EngineFault if the engine cannot be used.

    Returns:
        The result of `prove`, or None if the reference must be used, and a description of the choice for the report.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return None, type(tokenizer).__name__
    faults = []
    for name in ENGINES:
        if importlib.util.find_spec(name) is None:
            faults.append(f"{name} is not installed (the extra `data` has it)")
            continue
        try:
            proven = prove(name)
        except EngineFault as fault:
            faults.append(f"{name} {fault}")
        else:
            return proven, f"{name}, ids equal to the reference on {len(NASTY)} hard strings and a sample of the corpus"
    return None, "tokenizers, the reference: " + "; ".join(faults)

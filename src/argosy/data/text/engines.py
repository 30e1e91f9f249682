"""Faster engines for the same tokenizer, used only where they are proven to give the same ids.

The proof runs at every start, in every process that will encode: a set of strings that have tripped engines before, and
a sample of the corpus itself, encoded by the fast engine and by the reference (`tokenizers`). One different id, or a
missing engine, and the next one or the reference is used instead, and that is said. JSON is never given to an engine:
records are parsed by us.
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

# Leading white space before contractions, form feeds, control tokens as text, other scripts, digits, combining marks,
# emoji with joiners, long runs, zero-width characters, lone carriage returns.
NASTY = (
    "", " ", "  ", "\n", "\r\n\r\n", "\t\t x", "\n'main'", "\t'device", "\n'm", "\n't", "\t'd", "\n\n\x0c\n\n", "don't I'LL we'Re",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<s></s><unk>[CLS][SEP]", "é漢字かなкириллица", "e\u0301 \u1e69 ﬁ ½ ²",
    "👩‍👩‍👧‍👦 🏳️‍🌈", "\u200b\ufeff\u00a0\u3000x", "1234567890 ١٢٣ 12.5e-7", "x" * 3000, " " * 700 + "y", "ab" * 900,
    "def f(x):\n    return x**2  # ok\n\n\n\treturn", "http://a.b/c?d=e&f=%20#g", "\u0800\uffff\U0001f600\U0010ffff", "İıſßẞ",
)  # fmt: skip


Encode = Callable[[Sequence[str]], tuple[Ids, Lengths]]


def _fastokens(text: str, special_in_text: bool) -> Encode:
    for threads in ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS"):  # processes share the work: threads would compete
        os.environ.setdefault(threads, "1")
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

    if not special_in_text:  # it looks for every added token: those it should take for text are left out
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


# By the name of their module, the better first: they are about as fast, and gigatoken takes longer to load.
ENGINES: dict[str, Callable[[str, bool], Encode]] = {"fastokens": _fastokens, "gigatoken": _gigatoken}


class EngineFault(Exception):
    """Why an engine cannot be used for this tokenizer, in words that follow its name."""


def load_engine(name: str, tokenizer_json: str, special_in_text: bool) -> Encode:
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
    """Texts, and the ids the reference gives them: what an engine must give too."""

    texts: list[str]
    ids: Ids
    lengths: Lengths

    @classmethod
    def by(cls, reference: Tokenizer, sample: Sequence[str]) -> Proof:
        texts = [*NASTY, *sample]
        return cls(texts, *reference.encode(texts))

    def check(self, encode: Encode) -> None:
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
    """The first that `choose_engine` will try, so that it can be loaded beforehand."""
    names = (name for name in ENGINES if importlib.util.find_spec(name) is not None)
    return next(names, None) if isinstance(tokenizer, JsonTokenizer) else None


Proven = TypeVar("Proven")


def choose_engine(tokenizer: Tokenizer, prove: Callable[[str], Proven]) -> tuple[Proven | None, str]:
    """(what `prove` makes of the fastest engine without a fault, None for the reference; what was found, in words)"""
    if not isinstance(tokenizer, JsonTokenizer):
        return None, type(tokenizer).__name__
    found = []
    for name in ENGINES:
        if importlib.util.find_spec(name) is None:
            found.append(f"{name} is not installed (pip install 'argosy[data]')")
            continue
        try:
            proven = prove(name)
        except EngineFault as fault:
            found.append(f"{name} {fault}")
        else:
            return proven, f"{name}, ids equal to the reference on {len(NASTY)} hard strings and a sample of the corpus"
    return None, "tokenizers, the reference: " + "; ".join(found)

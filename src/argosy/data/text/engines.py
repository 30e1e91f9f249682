"""Faster engines for the same tokenizer, used only where they are proven to give the same ids.

The proof runs at every start: a set of strings that have tripped engines before, and a sample of the corpus itself,
encoded by the fast engine and by the reference (`tokenizers`). One different id, or a missing engine, and the reference
is used instead, and that is said. JSON is never given to an engine: records are parsed by us.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from argosy.data.text.tokenizer import Ids, JsonTokenizer, Lengths, Tokenizer

# Leading white space before contractions, form feeds, control tokens as text, other scripts, digits, combining marks,
# emoji with joiners, long runs, zero-width characters, lone carriage returns.
NASTY = (
    "", " ", "  ", "\n", "\r\n\r\n", "\t\t x", "\n'main'", "\t'device", "\n'm", "\n't", "\t'd", "\n\n\x0c\n\n", "don't I'LL we'Re",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<s></s><unk>[CLS][SEP]", "é漢字かなкириллица", "e\u0301 \u1e69 ﬁ ½ ²",
    "👩‍👩‍👧‍👦 🏳️‍🌈", "\u200b\ufeff\u00a0\u3000x", "1234567890 ١٢٣ 12.5e-7", "x" * 3000, " " * 700 + "y", "ab" * 900,
    "def f(x):\n    return x**2  # ok\n\n\n\treturn", "http://a.b/c?d=e&f=%20#g", "\u0800\uffff\U0001f600\U0010ffff", "İıſßẞ",
)  # fmt: skip


Encode = Callable[[Sequence[str]], tuple[Ids, Lengths]]


class FastTokenizer:
    """A tokenizer whose `encode` is done by another engine. Everything else is the reference's."""

    def __init__(self, reference: JsonTokenizer, engine: str) -> None:
        self.reference, self.engine = reference, engine
        self._encode = ENGINES[engine](reference.text, reference.special_in_text)
        self.fingerprint = reference.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.reference.vocab_size

    @property
    def eod_id(self) -> int:
        return self.reference.eod_id

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return self._encode(texts)

    def decode(self, ids: Iterable[int]) -> str:
        return self.reference.decode(ids)

    def id_of(self, token: str) -> int | None:
        return self.reference.id_of(token)

    def stored(self) -> tuple[str, bytes]:
        return self.reference.stored()


def _fastokens(text: str, special_in_text: bool) -> Encode:
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # processes share the work; threads inside them would compete
    fastokens = importlib.import_module("fastokens")

    engine: Any = fastokens.Tokenizer.from_json_str(text)
    engine.no_truncation()
    engine.no_padding()

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids, offsets = engine.encode_batch_flat(list(texts), split_special_tokens=not special_in_text)
        ends: Lengths = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1]

    return encode


ENGINES: dict[str, Callable[[str, bool], Encode]] = {"fastokens": _fastokens}  # by name, the fastest first


def likely_engine(tokenizer: Tokenizer) -> str | None:
    """The engine that will be chosen if its proof succeeds, so that workers can start before it has."""
    if not isinstance(tokenizer, JsonTokenizer):
        return None
    return next((name for name in ENGINES if importlib.util.find_spec(name) is not None), None)


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str]) -> tuple[Tokenizer, str]:
    """(the fastest engine proven equal on the nasty strings and the sample, what was found in words)"""
    if not isinstance(tokenizer, JsonTokenizer):
        return tokenizer, type(tokenizer).__name__
    found = []
    for name in ENGINES:
        try:
            fast = FastTokenizer(tokenizer, name)
        except ImportError:
            found.append(f"{name} is not installed (pip install 'argosy[data]')")
            continue
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, the reference still works
            found.append(f"{name} cannot load this tokenizer ({error})")
            continue
        fault = first_difference(fast, tokenizer, [*NASTY, *sample])
        if fault is None:
            return fast, f"{name}, ids equal to the reference on {len(NASTY)} hard strings and {len(sample)} documents"
        found.append(f"{name} differs from the reference on {fault[:40]!r}")
    return tokenizer, "tokenizers, the reference: " + "; ".join(found)


def release_memory() -> None:
    """Give freed memory back to the system, where the C library can be asked to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def first_difference(fast: Tokenizer, reference: Tokenizer, texts: Sequence[str]) -> str | None:
    """The first text that the two encode differently, alone or in a batch."""
    fast_ids, fast_lengths = fast.encode(texts)
    ids, lengths = reference.encode(texts)
    if np.array_equal(fast_lengths, lengths) and np.array_equal(fast_ids, ids):
        return None
    for text in texts:
        if not np.array_equal(fast.encode([text])[0], reference.encode([text])[0]):
            return text
    return "a batch of texts that are right one by one"

"""The token ids of a prompt, checked against the model's vocabulary: a published tokenizer may have more ids than its model."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.checkpoint.source import Source
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError


def encode_prompt(source: Source, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a prompt. Raise ArgosyError if the model has no embedding for one of them."""
    ids = tokenizer.encode(prompt)
    if (unknown := _without_row(source, ids)) is not None:
        token = tokenizer.decode([unknown])
        raise _beyond(
            source, f"the prompt holds {token!r}, whose id is {unknown:,}", "--prompt", f"leave {token!r} out"
        )
    return ids


def opening_ids(source: Source, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the model wants before every text. Raise ArgosyError if the model has no embedding for one of them."""
    ids = source.opening(tokenizer)
    if (unknown := _without_row(source, ids)) is not None:
        fix = f"correct bos_token_id in the config.json that {source.where} came with, and import it again"
        raise _beyond(source, f"every text begins with the id {unknown:,}", "bos_token_id", fix)
    return ids


def _without_row(source: Source, ids: Iterable[int]) -> int | None:
    return next((one for one in ids if not 0 <= one < source.model.vocab_size), None)


def _beyond(source: Source, what: str, key: str, fix: str) -> ArgosyError:
    last = source.model.vocab_size - 1
    return ArgosyError(
        "tokenizer.vocabulary", f"{what}, and the vocabulary of {source.where} ends at {last:,}", key=key, fix=fix
    )

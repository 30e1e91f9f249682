"""Special tokens by their names in the tokenizer, or by ids where it has no such token: a free id beyond its entries will
do, if the model has a row for it."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.schema import SpecialToken, T5Spec
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class SpecialTokens:
    tokenizer: Tokenizer | None
    vocab_size: int  # rows of the model

    def id_of(self, key: str, token: SpecialToken) -> int:
        """`key` is the one of the run spec that names the token."""
        found = token if isinstance(token, int) else None if self.tokenizer is None else self.tokenizer.id_of(token)
        if found is not None and found < self.vocab_size:
            return found
        entries = 0 if self.tokenizer is None else self.tokenizer.vocab_size
        if found is not None:
            cause = f"its id {found:,} is beyond the model's vocabulary of {self.vocab_size:,}"
        elif self.tokenizer is None:
            cause = f"without a tokenizer there is no token {token!r}"
        else:
            cause = f"the tokenizer has no token {token!r}"
        raise ArgosyError(
            "tokenizer.vocabulary",
            cause,
            key=key,
            value=token,
            fix=f"name a token of the tokenizer, or give an id that is free (its own end at {entries - 1:,}) and below "
            f"model.vocab_size {self.vocab_size:,}, enlarging that if need be",
        )

    def sentinels(self, t5: T5Spec) -> range:
        """T5's, the lowest id first, which is the last of them: as many as the spec says, or as are nothing else."""
        first = self.id_of("data.t5.sentinel", t5.sentinel)
        count = min(t5.sentinels, first + 1)
        if self.tokenizer is not None and isinstance(t5.sentinel, str) and t5.sentinel.endswith("0>"):
            names = [f"{t5.sentinel.removesuffix('0>')}{i}>" for i in range(count)]
            count = next((i for i, name in enumerate(names) if self.tokenizer.id_of(name) != first - i), count)
        elif self.tokenizer is not None and first >= self.tokenizer.vocab_size:  # a free id, and below are words
            count = min(count, first - self.tokenizer.vocab_size + 1)
        return range(first - count + 1, first + 1)

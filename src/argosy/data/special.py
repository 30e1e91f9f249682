"""Special tokens, looked up by their names in the tokenizer or given as ids.

If the tokenizer has no such token, a free id beyond its entries will do, provided that the model has a row for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.tasks.task import SpecialToken


@dataclass(frozen=True)
class SpecialTokens:
    tokenizer: Tokenizer | None
    # Rows of the model's vocabulary.
    vocab_size: int

    def id_of(self, key: str, token: SpecialToken) -> int:
        """Return the id of a token.

        Args:
            key: the key of the run spec that names the token, for error messages.
            token: its name in the tokenizer, or its id.

        Raises:
            ArgosyError: the tokenizer has no such token, or the id is beyond the model's vocabulary.
        """
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

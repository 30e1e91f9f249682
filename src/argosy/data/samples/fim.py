"""Fill-in-the-middle (FIM): rearrange some documents of a sample so that a model learns infilling (Bavarian et al., 2022).

A document is cut at two places into prefix, middle and suffix, which become, as in Megatron's GPTFIMDataset,

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

where the three names in brackets are sentinel tokens.

Megatron decodes the document to text, cuts it between characters and encodes the parts again. Here the cuts lie between
tokens: every token is one that the tokenizer gave for the whole text, the original order can be restored, no tokenizer runs
during training, and a sample is the same on every machine. The price is that a model never sees a cut inside a token.
Megatron draws from one running generator, which makes a sample depend on those read before it. Here the draws are keyed by
(seed, epoch, sample) and the place of the document in the sample.

The sample length and the place of every EOD stay the same: the three sentinels replace the document's last three tokens,
which are dropped before it is cut. Megatron instead truncates the end of the sample, which drops as many tokens, but moves
the EODs and can leave the last document with sentinels but no middle. Documents with fewer than four tokens, and those that
already contain a sentinel, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from argosy.data.samples.draws import fractions, sample_keys
from argosy.errors import ArgosyError

Row = npt.NDArray[np.int64]
_SENTINELS = 3


@dataclass(frozen=True)
class FillInTheMiddle:
    """The FIM transform. `prefix`, `middle` and `suffix` are the ids of the sentinel tokens."""

    prefix: int
    middle: int
    suffix: int
    eod: int
    # The fraction of documents that are rearranged.
    rate: float = 0.5
    # The fraction of rearranged documents in SPM order; the others are in PSM order.
    spm_rate: float = 0.5

    def __post_init__(self) -> None:
        for key, value in (("data.fim.rate", self.rate), ("data.fim.spm_rate", self.spm_rate)):
            if not 0 <= value <= 1:
                raise ArgosyError(
                    "config.bad-value", "it is a probability", key=key, value=value, fix="give a number from 0 to 1"
                )
        ids = (self.prefix, self.middle, self.suffix, self.eod)
        if len(set(ids)) < len(ids) or min(ids) < 0:
            raise ArgosyError(
                "config.conflict",
                f"the prefix, middle and suffix sentinels and the end-of-document token are {ids}: they must be four "
                "different token ids",
                key="data.fim",
                fix="name three special tokens that the corpus itself does not use",
            )

    def rearrange(self, rows: Row, seed: int, epochs: Iterable[int], samples: Iterable[int]) -> Row:
        """Return a rearranged copy of `rows`. `epochs` and `samples` key the random draws of each row.  # [count, length]"""
        keys = sample_keys(seed, "fim", epochs, samples)
        rearranged = rows.copy()
        taken = (rows == self.prefix) | (rows == self.middle) | (rows == self.suffix)
        for row, held, key in zip(rearranged, taken, keys, strict=True):
            ends = np.append(np.flatnonzero(row == self.eod), len(row))
            # Four draws per document: whether it is rearranged, the two cuts, and the order.
            draws = fractions(key[None], 4 * len(ends))[0].reshape(-1, 4)
            for document in np.flatnonzero(draws[:, 0] < self.rate):
                start = int(ends[document - 1]) + 1 if document else 0
                end = int(ends[document])
                if end - start > _SENTINELS and not held[start:end].any():
                    self._rearrange_document(row[start:end], *draws[document, 1:].tolist())
        return rearranged

    def _rearrange_document(self, document: Row, one_cut: float, other_cut: float, order: float) -> None:
        """Rearrange one document in place. The cuts are fractions in [0, 1), and each part may be empty."""
        kept = len(document) - _SENTINELS
        first, second = sorted((int(one_cut * (kept + 1)), int(other_cut * (kept + 1))))
        before, between, after = document[:first], document[first:second], document[second:kept]
        if order < self.spm_rate:
            parts: list[Row | list[int]] = [[self.prefix, self.suffix], after, [self.middle], before, between]
        else:
            parts = [[self.prefix], before, [self.suffix], after, [self.middle], between]
        document[:] = np.concatenate(parts)

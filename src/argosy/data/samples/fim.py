"""Fill-in-the-middle: some documents of a sample are rearranged so that a model learns to write what is missing between
two texts (Bavarian et al., 2022). A document is cut in two places into prefix, middle and suffix, which become

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

as Megatron's GPTFIMDataset writes them, where the three names in brackets are sentinel tokens.

Megatron turns the document back into text, cuts it between characters and encodes the parts again; here the cuts lie
between tokens. So every token is one that the tokenizer gave for the whole text, what is shown can be put back in order,
no tokenizer runs while training, and a sample is the same on every machine. The price is that a model never sees a cut
inside a word. Also unlike Megatron, whose one running generator makes a sample depend on those read before it, the
draws are keyed by (seed, epoch, sample) and the place of the document in the sample.

The length never changes, and neither does the place of any EOD: the three sentinels take the room of the document's
last three tokens, which are left out before it is cut. Cutting the end of the sample instead, as Megatron does, loses
as many tokens, but moves the EODs and can leave a last document without the middle that its sentinels announce.
Documents with fewer than four tokens, and those that already hold a sentinel, stay as they are.
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
    """How often, and with which tokens."""

    prefix: int  # sentinel ids
    middle: int
    suffix: int
    eod: int
    rate: float = 0.5  # of the documents
    spm_rate: float = 0.5  # of those rearranged

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
        """The samples `samples` of their epochs, rearranged. The rows given stay as they are.  # [count, length]"""
        keys = sample_keys(seed, "fim", epochs, samples)
        rearranged = rows.copy()
        taken = (rows == self.prefix) | (rows == self.middle) | (rows == self.suffix)
        for row, held, key in zip(rearranged, taken, keys, strict=True):
            ends = np.append(np.flatnonzero(row == self.eod), len(row))
            draws = fractions(key[None], 4 * len(ends))[0].reshape(-1, 4)  # chosen, two cuts, SPM
            for document in np.flatnonzero(draws[:, 0] < self.rate):
                start = int(ends[document - 1]) + 1 if document else 0
                end = int(ends[document])
                if end - start > _SENTINELS and not held[start:end].any():
                    self._rearrange_document(row[start:end], *draws[document, 1:].tolist())
        return rearranged

    def _rearrange_document(self, document: Row, one_cut: float, other_cut: float, order: float) -> None:
        """In place. The cuts are given as fractions, and each part may turn out empty."""
        kept = len(document) - _SENTINELS
        first, second = sorted((int(one_cut * (kept + 1)), int(other_cut * (kept + 1))))
        before, between, after = document[:first], document[first:second], document[second:kept]
        if order < self.spm_rate:
            parts: list[Row | list[int]] = [[self.prefix, self.suffix], after, [self.middle], before, between]
        else:
            parts = [[self.prefix], before, [self.suffix], after, [self.middle], between]
        document[:] = np.concatenate(parts)

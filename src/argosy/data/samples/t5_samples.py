"""Span corruption, the objective of T5 (Raffel et al., 2020): spans of the text are replaced by sentinels, and the
decoder writes each sentinel followed by what it stands for.

    text      Thank you for inviting me to your party last week
    inputs    Thank you <X> me to your party <Y> week EOS
    targets   <X> for inviting <Y> last EOS

The number of corrupted tokens and of spans depends on the text's length alone, so all samples have the same shape and
nothing is padded: the text is made just so long (568 tokens for 512) that its corrupted form fills `seq_len` exactly.
How the corrupted tokens are shared out among the spans, and the kept ones among the gaps, is drawn uniformly from all
ways to do so (stars and bars), keyed by (seed, epoch, sample). A text begins with a kept stretch and ends with a
corrupted one, as T5's do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from argosy.data.samples.draws import Keys, sample_keys, words
from argosy.data.samples.windows import Batch, check_ids
from argosy.errors import ArgosyError

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SpanBatch:
    """`count` samples; every target counts towards the loss."""

    tokens: Rows  # for the encoder  # [count, seq_len]
    decoder_tokens: Rows  # the targets, one to the right  # [count, target_len]
    labels: Rows  # the targets  # [count, target_len]


@dataclass(frozen=True)
class Lengths:
    """What becomes of a text of `text` tokens."""

    text: int
    noise: int  # tokens replaced
    spans: int  # stretches of them

    @property
    def inputs(self) -> int:
        return self.text - self.noise + self.spans + 1  # kept tokens, a sentinel for each span, EOS

    @property
    def targets(self) -> int:
        return self.noise + self.spans + 1


def corrupted_lengths(text: int, noise_density: float, mean_span: float) -> Lengths:
    """T5's rounding. A token at least is replaced and one kept; each span has a token of its own and one before it."""
    noise = min(max(round(text * noise_density), 1), text - 1)
    spans = min(max(round(noise / mean_span), 1), noise, text - noise)
    return Lengths(text, noise, spans)


def lengths_for(seq_len: int, noise_density: float, mean_span: float) -> Lengths:
    """The longest text whose corrupted form, EOS included, has at most `seq_len` tokens.

    A text longer by one token never gives shorter inputs, and they grow by one at most unless spans must be left out
    because fewer tokens are kept than there are spans; so any length can be met exactly but with extreme settings.
    """
    enough = int((seq_len + 2) / (1 - noise_density)) + 3  # so many keep more than seq_len tokens
    texts = range(2, enough)
    fit = bisect_right(texts, seq_len, key=lambda text: corrupted_lengths(text, noise_density, mean_span).inputs)
    return corrupted_lengths(texts[fit - 1], noise_density, mean_span)


@dataclass(frozen=True)
class SpanCorruption:
    """Texts of `text_len` tokens in, samples of `seq_len` and `target_len` out."""

    seq_len: int
    first_sentinel: int  # the next ones count down from it
    eos: int
    decoder_start: int = 0  # what the decoder reads first; T5 uses its padding id
    noise_density: float = 0.15
    mean_span: float = 3.0
    sentinels: int = 100  # that the vocabulary holds
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise _refused("data.t5.noise_density", self.noise_density, "it is a share", "give one between 0 and 1")
        if not self.mean_span >= 1:
            raise _refused("data.t5.mean_span", self.mean_span, "a span has a token at least", "give 1 or more")
        if self.seq_len < 3:
            raise _refused(
                "data.seq_len",
                self.seq_len,
                "the shortest input is a kept token + a sentinel + EOS = 3 tokens",
                "give 3 or more",
            )
        lengths = lengths_for(self.seq_len, self.noise_density, self.mean_span)
        object.__setattr__(self, "lengths", lengths)
        if lengths.inputs != self.seq_len:
            longer = corrupted_lengths(lengths.text + 1, self.noise_density, self.mean_span).inputs
            raise _refused(
                "data.seq_len",
                self.seq_len,
                f"with noise_density {self.noise_density:g} in spans of {self.mean_span:g}, a text of {lengths.text} "
                f"tokens is corrupted to {lengths.inputs} and one of {lengths.text + 1} to {longer}: none to "
                f"{self.seq_len}",
                f"give data.seq_len {lengths.inputs} or {longer}, or corrupt less than half of the text",
            )
        if lengths.spans > min(self.sentinels, self.first_sentinel + 1):
            last = self.first_sentinel - min(self.sentinels, self.first_sentinel + 1) + 1
            raise _refused(
                "data.seq_len",
                self.seq_len,
                f"{self.seq_len} tokens hold {lengths.spans} spans ({lengths.noise} of {lengths.text} tokens in spans "
                f"of {self.mean_span:g}); the sentinels {self.first_sentinel} down to {last} name "
                f"only {self.first_sentinel - last + 1}",
                "shorten data.seq_len, lengthen data.t5.mean_span, or use a tokenizer with more sentinels, whose ids fall, or "
                "more ids that are free",
            )
        for name, token in (("eos", self.eos), ("pad", self.decoder_start)):
            if token in self.used_sentinels:
                raise _refused(
                    "data.t5.sentinel",
                    self.first_sentinel,
                    f"{lengths.spans} spans have the sentinels {self.first_sentinel} down to {self.used_sentinels[0]}, "
                    f"and {token} among them is data.t5.{name}",
                    f"give {lengths.spans} ids in a row that mean nothing else, the highest as data.t5.sentinel",
                )

    @property
    def used_sentinels(self) -> range:
        """The ids that stand for spans, lowest first."""
        return range(self.first_sentinel - self.lengths.spans + 1, self.first_sentinel + 1)

    @property
    def text_len(self) -> int:
        """Tokens to read for one sample."""
        return self.lengths.text

    @property
    def target_len(self) -> int:
        return self.lengths.targets

    def corrupt(self, texts: Rows, seed: int, epochs: Iterable[int], samples: Iterable[int]) -> SpanBatch:
        """The samples `samples` of their epochs, from their texts.  # [count, text_len]"""
        noise = self.noise_mask(sample_keys(seed, "t5", epochs, samples))
        labels = self._fold(texts, ~noise, self.target_len)
        decoder_tokens = np.roll(labels, 1, axis=1)
        decoder_tokens[:, 0] = self.decoder_start
        return SpanBatch(tokens=self._fold(texts, noise, self.seq_len), decoder_tokens=decoder_tokens, labels=labels)

    def noise_mask(self, keys: Keys) -> Mask:
        """True where a token is replaced.  # [count, text_len]"""
        lengths = self.lengths
        draws = words(keys, lengths.text - 2)
        noise = _segments(draws[:, : lengths.noise - 1], lengths.spans)
        kept = _segments(draws[:, lengths.noise - 1 :], lengths.spans)
        ends = np.cumsum(
            np.stack([kept, noise], axis=2).reshape(len(keys), 2 * lengths.spans), axis=1
        )  # kept, noise, kept, noise …
        flips = np.zeros((len(keys), lengths.text), np.int64)
        np.put_along_axis(flips, ends[:, :-1], 1, axis=1)
        return np.asarray(np.cumsum(flips, axis=1) % 2 == 1)

    def _fold(self, texts: Rows, hidden: Mask, length: int) -> Rows:
        """Each hidden stretch becomes its sentinel, and EOS ends the row."""
        starts = hidden.copy()
        starts[:, 1:] &= ~hidden[:, :-1]
        sentinels = self.first_sentinel - (np.cumsum(starts, axis=1) - 1)
        folded = np.where(starts, sentinels, texts)[starts | ~hidden].reshape(len(texts), length - 1)
        return np.pad(folded, ((0, 0), (0, 1)), constant_values=self.eos)


@dataclass(frozen=True)
class SpanMaker:
    """Span corruption of windows of the token stream, `text_len` tokens and the one after them, which is left out."""

    vocab_size: int
    seed: int
    task: SpanCorruption

    def batch(self, rows: Rows, first: int, name: Callable[[int], str]) -> Batch:
        check_ids(rows, self.vocab_size, name)
        indices = range(first, first + len(rows))  # a sample index is never used twice, whatever the epoch
        made = self.task.corrupt(rows[:, :-1], self.seed, [0] * len(rows), indices)
        return Batch(made.tokens, made.labels, {"decoder_tokens": made.decoder_tokens})


def _segments(draws: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.int64]:
    """The sizes of `count` non-empty segments of n items, from a random word for each of the n - 1 gaps between them:
    the gaps with the smallest words become bounds.  # [rows, n - 1] -> [rows, count]"""
    chosen = np.sort(np.argsort(draws, axis=1, kind="stable")[:, : count - 1], axis=1) + 1
    bounds = np.pad(chosen, ((0, 0), (1, 1)))
    bounds[:, -1] = draws.shape[1] + 1
    return np.diff(bounds, axis=1)


def _refused(key: str, value: object, cause: str, fix: str) -> ArgosyError:
    return ArgosyError("config.arithmetic", cause, key=key, value=value, fix=fix)

"""Span corruption, the objective of T5 (Raffel et al., 2020): spans of the text are replaced by sentinels, and the
decoder writes each sentinel followed by the span it replaces.

    text      Thank you for inviting me to your party last week
    inputs    Thank you <X> me to your party <Y> week EOS
    targets   <X> for inviting <Y> last EOS

The number of corrupted tokens and of spans depends only on the text's length. All samples therefore have the same shape and
need no padding: the text has the length (568 tokens for 512) whose corrupted form fills `seq_len` exactly. The division of the
corrupted tokens into spans, and of the kept ones into gaps, is drawn uniformly from all possible divisions (stars and bars),
keyed by (seed, epoch, sample). A text begins with kept tokens and ends with a corrupted span, as in T5.
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
    """A batch of `count` samples. Every target counts in the loss."""

    # The encoder's tokens.
    tokens: Rows  # [count, seq_len]
    # The targets, shifted right by one.
    decoder_tokens: Rows  # [count, target_len]
    # The targets.
    labels: Rows  # [count, target_len]


@dataclass(frozen=True)
class Lengths:
    """The lengths that result from corrupting a text of `text` tokens: `noise` tokens are replaced, in `spans` spans."""

    text: int
    noise: int
    spans: int

    @property
    def inputs(self) -> int:
        # Kept tokens, a sentinel for each span, EOS.
        return self.text - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        return self.noise + self.spans + 1


def corrupted_lengths(text: int, noise_density: float, mean_span: float) -> Lengths:
    """Return the lengths for a text, with T5's rounding.

    At least one token is replaced and one kept. Each span has at least one token, and one kept token before it.
    """
    noise = min(max(round(text * noise_density), 1), text - 1)
    spans = min(max(round(noise / mean_span), 1), noise, text - noise)
    return Lengths(text, noise, spans)


def lengths_for(seq_len: int, noise_density: float, mean_span: float) -> Lengths:
    """Return the lengths of the longest text whose corrupted form, EOS included, has at most `seq_len` tokens.

    One more token of text never shortens the inputs. It lengthens them by at most one, unless spans must be left out because
    fewer tokens are kept than there are spans. Any length can therefore be met exactly, except with extreme settings.
    """
    # A text of this length keeps more than seq_len tokens.
    enough = int((seq_len + 2) / (1 - noise_density)) + 3
    texts = range(2, enough)
    fit = bisect_right(texts, seq_len, key=lambda text: corrupted_lengths(text, noise_density, mean_span).inputs)
    return corrupted_lengths(texts[fit - 1], noise_density, mean_span)


@dataclass(frozen=True)
class SpanCorruption:
    """The corruption of texts of `text_len` tokens into samples of `seq_len` inputs and `target_len` targets."""

    seq_len: int
    # The next sentinels have the ids below it.
    first_sentinel: int
    eos: int
    # The decoder's first token. T5 uses its padding id.
    decoder_start: int = 0
    noise_density: float = 0.15
    mean_span: float = 3.0
    # The number of sentinels in the vocabulary.
    sentinels: int = 100
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
        """The ids of the sentinels in use, lowest first."""
        return range(self.first_sentinel - self.lengths.spans + 1, self.first_sentinel + 1)

    @property
    def text_len(self) -> int:
        """The number of tokens to read for one sample."""
        return self.lengths.text

    @property
    def target_len(self) -> int:
        return self.lengths.targets

    def corrupt(self, texts: Rows, seed: int, epochs: Iterable[int], samples: Iterable[int]) -> SpanBatch:
        """Return the samples `samples` of their epochs, made from their texts [count, text_len]."""
        noise = self.noise_mask(sample_keys(seed, "t5", epochs, samples))
        labels = self._fold(texts, ~noise, self.target_len)
        decoder_tokens = np.roll(labels, 1, axis=1)
        decoder_tokens[:, 0] = self.decoder_start
        return SpanBatch(tokens=self._fold(texts, noise, self.seq_len), decoder_tokens=decoder_tokens, labels=labels)

    def noise_mask(self, keys: Keys) -> Mask:
        """Return a mask that is True for the tokens to replace. [count, text_len]"""
        lengths = self.lengths
        draws = words(keys, lengths.text - 2)
        noise = _segments(draws[:, : lengths.noise - 1], lengths.spans)
        kept = _segments(draws[:, lengths.noise - 1 :], lengths.spans)
        # Kept, noise, kept, noise …
        ends = np.cumsum(np.stack([kept, noise], axis=2).reshape(len(keys), 2 * lengths.spans), axis=1)
        flips = np.zeros((len(keys), lengths.text), np.int64)
        np.put_along_axis(flips, ends[:, :-1], 1, axis=1)
        return np.asarray(np.cumsum(flips, axis=1) % 2 == 1)

    def _fold(self, texts: Rows, hidden: Mask, length: int) -> Rows:
        """Replace each hidden span with its sentinel, and end each row with EOS."""
        starts = hidden.copy()
        starts[:, 1:] &= ~hidden[:, :-1]
        sentinels = self.first_sentinel - (np.cumsum(starts, axis=1) - 1)
        folded = np.where(starts, sentinels, texts)[starts | ~hidden].reshape(len(texts), length - 1)
        return np.pad(folded, ((0, 0), (0, 1)), constant_values=self.eos)


@dataclass(frozen=True)
class SpanMaker:
    """A maker that corrupts windows of the token stream. A window has `text_len` + 1 tokens; the last is not used."""

    vocab_size: int
    seed: int
    task: SpanCorruption

    def batch(self, rows: Rows, first: int, name: Callable[[int], str]) -> Batch:
        check_ids(rows, self.vocab_size, name)
        # A sample index is never used twice, in any epoch.
        indices = range(first, first + len(rows))
        made = self.task.corrupt(rows[:, :-1], self.seed, [0] * len(rows), indices)
        return Batch(made.tokens, made.labels, {"decoder_tokens": made.decoder_tokens})


def _segments(draws: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.int64]:
    """Return the sizes of `count` non-empty segments of n items. [rows, n - 1] -> [rows, count]

    `draws` has a random word for each of the n - 1 gaps between items. The gaps with the smallest words become bounds.
    """
    chosen = np.sort(np.argsort(draws, axis=1, kind="stable")[:, : count - 1], axis=1) + 1
    bounds = np.pad(chosen, ((0, 0), (1, 1)))
    bounds[:, -1] = draws.shape[1] + 1
    return np.diff(bounds, axis=1)


def _refused(key: str, value: object, cause: str, fix: str) -> ArgosyError:
    return ArgosyError("config.arithmetic", cause, key=key, value=value, fix=fix)

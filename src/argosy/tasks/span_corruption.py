"""Span corruption, T5's task: spans of a text are replaced by sentinels, and an encoder-decoder predicts the spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.config.model import Section
from argosy.config.units import NotBool, Positive
from argosy.families.architecture import ENCODER_DECODER
from argosy.tasks.task import Opened, Run, SpecialToken, Task

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus
    from argosy.data.samples.windows import Batch, Stream
    from argosy.data.special import SpecialTokens


class T5Spec(Section):
    """Span corruption: the samples of an encoder-decoder. The defaults are T5's."""

    noise_density: Annotated[float, Field(gt=0, lt=1), NotBool] = Field(
        0.15, description="share of the text's tokens to predict"
    )
    mean_span: Annotated[float, Field(ge=1), NotBool] = Field(3.0, description="tokens in a corrupted span, on average")
    sentinel: SpecialToken = Field(
        "<extra_id_0>",
        description="the sentinel token of the first span, or its id; the next ones have the ids below it",
    )
    sentinels: Positive = Field(100, description="number of sentinel tokens")
    eos: SpecialToken = Field("</s>", description="the token that ends inputs and targets, or its id")
    pad: SpecialToken = Field("<pad>", description="the token the decoder starts from, or its id")


class SpanCorruptionTask(Task[T5Spec]):
    name = "span-corruption"
    samples = "corrupted spans (data.t5)"
    architectures = (ENCODER_DECODER,)
    section = "t5"
    settings_type = T5Spec
    roles = ("sentinel", "eos", "pad")
    writes = "spans"

    def other_lengths(self, run: Run) -> dict[str, int | None]:
        return {"targets": None}

    def target_len(self, run: Run) -> int | None:
        from argosy.data.samples.t5_samples import lengths_for

        t5 = self.settings(run)
        return lengths_for(run.data.seq_len, t5.noise_density, t5.mean_span).targets

    def example_prompt(self, run: Run) -> str:
        return "Once upon a <extra_id_0>"

    def stream(
        self, opened: Opened, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None, *, training: bool
    ) -> Stream:
        """Return windows of the token stream, of the length whose corrupted form fills data.seq_len."""
        from argosy.data.samples.t5_samples import SpanCorruption, SpanMaker
        from argosy.data.samples.windows import SampleStream, Windows

        run, special, t5 = opened.run, opened.special, self.settings(opened.run)
        names = sentinels(special, t5)
        how = SpanCorruption(
            run.data.seq_len,
            names[-1],
            special.id_of("data.t5.eos", t5.eos),
            decoder_start=special.id_of("data.t5.pad", t5.pad),
            noise_density=t5.noise_density,
            mean_span=t5.mean_span,
            sentinels=len(names),
        )
        sets = [Windows(corpus, corpus.split(run.data.split)[split], how.text_len) for corpus in corpora]
        return SampleStream(sets, weights, run.train.seed, SpanMaker(run.model.vocab_size, run.train.seed, how))

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        from argosy.data.samples.windows import Batch

        tokens, target = draw(run.data.seq_len), draw(self.target_len(run) or 1)
        return Batch(tokens, target, {"decoder_tokens": target})


def sentinels(special: SpecialTokens, t5: T5Spec) -> range:
    """Return the ids of the sentinels, lowest first; the lowest id is the last sentinel.

    There are as many as the spec says, or fewer if some of the ids are other tokens.
    """
    tokenizer = special.tokenizer
    first = special.id_of("data.t5.sentinel", t5.sentinel)
    count = min(t5.sentinels, first + 1)
    if tokenizer is not None and isinstance(t5.sentinel, str) and t5.sentinel.endswith("0>"):
        names = [f"{t5.sentinel.removesuffix('0>')}{i}>" for i in range(count)]
        count = next((i for i, name in enumerate(names) if tokenizer.id_of(name) != first - i), count)
    elif tokenizer is not None and first >= tokenizer.vocab_size:
        # A free id. The ids of the tokenizer's own tokens are below it.
        count = min(count, first - tokenizer.vocab_size + 1)
    return range(first - count + 1, first + 1)

"""Prefix language modelling: a decoder sees the first part of a sample in both directions, and predicts the rest token by token.

The length of the prefix is drawn from (seed, sample index), so it depends neither on the layout nor on where a run was resumed.
The prefix has no loss, except that its last token predicts the first token after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from argosy.config.model import Section
from argosy.config.origins import Origins
from argosy.config.units import NotBool
from argosy.errors import ArgosyError
from argosy.tasks.causal_lm import WindowTask
from argosy.tasks.task import Opened, Run

if TYPE_CHECKING:
    from argosy.data.samples.windows import Batch, Maker

Share = Annotated[float, Field(ge=0, le=1), NotBool]


class PrefixSpec(Section):
    """Prefix language modelling: how much of each sample is the prefix, drawn evenly between two shares."""

    shortest: Share = Field(0.0, description="share of a sample that is the prefix at least")
    longest: Share = Field(1.0, description="share of a sample that is the prefix at most; one token is always left")


class PrefixLM(WindowTask[PrefixSpec]):
    name = "prefix-lm"
    samples = "windows of the token stream with a prefix (data.prefix)"
    section = "prefix"
    settings_type = PrefixSpec
    mask_inputs = ("reach",)
    writes = "continuation"

    def check(self, run: Run, origins: Origins) -> None:
        super().check(run, origins)
        prefix = self.settings(run)
        if prefix.shortest > prefix.longest:
            raise ArgosyError(
                "config.bad-value",
                f"the shortest prefix, {prefix.shortest:g} of a sample, is longer than the longest, {prefix.longest:g}",
                key="data.prefix.shortest",
                value=prefix.shortest,
                origin=origins.get("data.prefix.shortest"),
                fix=f"data.prefix.shortest={prefix.longest:g}, or less",
            )
        if run.model.positions == "alibi":
            raise ArgosyError(
                "config.conflict",
                "ALiBi favours near tokens behind a query, and would favour far ones ahead of it",
                key="data.task",
                value=self.name,
                origin=origins.get("data.task"),
                fix="data.task=causal-lm, or a model with learned or rotary positions",
            )

    def maker(self, opened: Opened, *, fim: bool) -> Maker:
        run = opened.run
        return PrefixMaker(super().maker(opened, fim=fim), run.train.seed, self.settings(run))

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        return with_prefix(super().synthetic(run, draw), 0, run.train.seed, self.settings(run))

    def prompt_inputs(self, prompt: int, shown: range) -> dict[str, list[int]]:
        return {"reach": [max(place, prompt - 1) - shown.start for place in shown]}


@dataclass(frozen=True)
class PrefixMaker:
    """A maker that adds prefixes to the batches of another maker."""

    inner: Maker
    seed: int
    prefix: PrefixSpec

    def batch(self, rows: Any, first: int, name: Callable[[int], str]) -> Batch:
        return with_prefix(self.inner.batch(rows, first, name), first, self.seed, self.prefix)


def with_prefix(batch: Batch, first: int, seed: int, prefix: PrefixSpec) -> Batch:
    """Return samples `first`, `first` + 1, … with labels only after the prefix, and with `reach`, the last token each token sees."""
    import numpy as np

    from argosy.data.samples.draws import fractions, sample_keys
    from argosy.data.samples.masks import IGNORED
    from argosy.data.samples.windows import Batch

    count, seq = batch.tokens.shape
    # A sample index is never used twice, in any epoch.
    indices = range(first, first + count)
    drawn = fractions(sample_keys(seed, "prefix", [0] * count, indices), 1)  # [count, 1]
    share = prefix.shortest + (prefix.longest - prefix.shortest) * drawn
    lengths = np.clip((share * (seq + 1)).astype(np.int64), 1, seq)
    places = np.arange(seq)
    labels = np.where(places < lengths - 1, IGNORED, batch.labels)
    return Batch(batch.tokens, labels, batch.inputs | {"reach": np.maximum(places, lengths - 1)})

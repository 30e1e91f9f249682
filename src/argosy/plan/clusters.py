"""Several clusters side by side, and the cheapest that finishes a run in time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from argosy.errors import ArgosyError
from argosy.plan.advise import FOR_COPYING, Advice
from argosy.plan.plan_report import LEGEND, MEAN_ERROR, copied, run_length, table

# The most nodes that are tried for a node type without a number.
_MOST_NODES = 512


@dataclass(frozen=True)
class Comparison:
    """The answers for several clusters, as asked for. `refusals` maps a cluster that cannot run the model to the reason."""

    answers: dict[str, Advice]
    refusals: dict[str, str]
    within: float | None

    @property
    def cheapest(self) -> str | None:
        """The cheapest cluster that finishes in time; the fastest, if no price is known."""
        lengths = {name: run_length(one.shown[0], one.question.tokens) for name, one in self.answers.items()}
        known = {name: length for name, length in lengths.items() if length is not None}
        timely = {name: length for name, length in known.items() if self.within is None or length[0] <= self.within}
        priced = {name: length[1] for name, length in timely.items() if length[1] is not None}
        if priced:
            return min(priced, key=priced.__getitem__)
        return min(timely, key=lambda name: timely[name][0], default=None)

    def lines(self) -> list[str]:
        rows = table([one.shown[0] for one in self.answers.values()], next(iter(self.answers.values())).question.tokens)
        names = ["cluster", *self.answers]
        width = max(map(len, names))
        question = next(iter(self.answers.values())).question
        length = "" if question.tokens is None else f"{question.tokens:,} tokens"
        length += f" ({question.length_from})" if length else question.length_from or "of unknown length"
        lines = [f"run: {length}; the best layout of each cluster"]
        lines += ["  ".join((name.ljust(width), row)) for name, row in zip(names, rows, strict=True)]
        lines += LEGEND
        lines += self.price_origins()
        lines += [f"{name}: {why}" for name, why in self.refusals.items()]
        lines += ["", self.verdict()]
        best = None if self.cheapest is None else self.answers[self.cheapest].shown[0]
        return lines if best is None else [*lines, "", FOR_COPYING, *copied(best)]

    def price_origins(self) -> list[str]:
        """Say where prices come from that are neither the instance's nor the user's own, once for clusters that share the origin."""
        names: dict[str, list[str]] = {}
        for name, one in self.answers.items():
            names.setdefault(one.question.price_from, []).append(name)
        return [f"price of {', '.join(which)}: {origin}" for origin, which in names.items() if origin]

    def verdict(self) -> str:
        limit = "" if self.within is None else f" within {self.within:g} days"
        if self.cheapest is None:
            known = any(one.question.tokens is not None for one in self.answers.values())
            unknown = "the length of the run is not known: --tokens gives it"
            return f"none of these clusters finishes{limit}: take more nodes, or fewer tokens" if known else unknown
        days, dollars = run_length(
            self.answers[self.cheapest].shown[0], self.answers[self.cheapest].question.tokens
        ) or (0.0, None)
        cost = "no price is known" if dollars is None else f"${dollars:,.0f} ±{MEAN_ERROR:.0%}"
        tight = self.within is not None and days * (1 + MEAN_ERROR) > self.within
        kind = "fastest" if dollars is None else "cheapest"
        margin = "; its error bar reaches beyond that" if tight else ""
        unpriced = [name for name, one in self.answers.items() if one.question.cluster.price is None]
        if dollars is not None and unpriced:
            margin += f"; no price is known for {', '.join(unpriced)}"
        return f"{kind}{limit}: {self.cheapest}, {days:,.1f} days, {cost}{margin}"

    def as_dict(self) -> dict[str, Any]:
        answers = {name: one.as_dict() for name, one in self.answers.items()}
        return {
            "clusters": answers,
            "refused": self.refusals,
            "within_days": self.within,
            "cheapest": self.cheapest,
            "verdict": self.verdict(),
            "legend": [*LEGEND, *self.price_origins()],
        }


def compare(names: Sequence[str], ask: Callable[[str], Advice], within: float | None) -> Comparison:
    """Answer for each cluster. With `within` days, a node type without a number stands for the fewest nodes that suffice.

    Raises:
        ArgosyError: no cluster can run the model.
    """
    answers: dict[str, Advice] = {}
    refusals: dict[str, str] = {}
    last: ArgosyError | None = None
    for name in names:
        for one in _counts(name) if within is not None else [name]:
            try:
                found = ask(one)
            except ArgosyError as error:
                refusals[one], last = error.cause, error
                continue
            answers[one] = found
            length = run_length(found.shown[0], found.question.tokens)
            if within is None or length is None or length[0] <= within:
                break
    if not answers and last is not None:
        raise last
    if within is not None and all(one.question.tokens is None for one in answers.values()):
        raise ArgosyError(
            "plan.bad-question",
            "the length of the run is not known, so no cluster can be said to finish it in time",
            key="--within",
            value=within,
            fix="--tokens gives the length",
        )
    return Comparison(answers, refusals, within)


def _counts(name: str) -> Iterator[str]:
    """Yield a cluster with a number as it is, and a node type with 1, 2, 4, … nodes."""
    if re.match(r"\s*\d", name):
        yield name
        return
    nodes = 1
    while nodes <= _MOST_NODES:
        yield f"{nodes}x{name.strip()}"
        nodes *= 2

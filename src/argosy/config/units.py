"""Units of the run spec: durations such as `500ba` (optimiser steps), `20B` (tokens), `2ep`, `10000sp` (samples), `30min`.

A duration is stored as an amount and a unit. It is converted to steps only where the batch size, the sequence length and the size
of the data are known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from argosy.config.batches import Batches

_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_COUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_DURATION = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([KMBT]?)\s*(ba|tok|ep|sp|s|min|h|d)?", re.IGNORECASE)

# The units of a run's length, which are keys of `train`, and their suffixes.
LENGTH_UNITS = {"steps": "ba", "tokens": "tok", "samples": "sp", "epochs": "ep"}
LENGTH_KEYS = tuple(f"train.{unit}" for unit in LENGTH_UNITS)

DURATION_HELP = "write steps as 500 or 500ba, tokens as 20B or 300Mtok, epochs as 2ep, samples as 10Ksp, time as 30min"


@dataclass(frozen=True)
class Duration:
    """An amount of training. `unit` is one of: steps, tokens, epochs, samples, seconds."""

    amount: float
    unit: str

    def __str__(self) -> str:
        amount = f"{self.amount:.17g}"
        if self.unit == "seconds":
            for suffix, seconds in reversed(_SECONDS.items()):
                if self.amount >= seconds and self.amount % seconds == 0:
                    return f"{self.amount / seconds:.17g}{suffix}"
        return amount + (LENGTH_UNITS | {"seconds": "s"})[self.unit]

    def samples(self, *, seq_len: int, epoch_samples: int | None = None) -> int | None:
        """Number of samples that cover this duration, rounded up, or None if the unit is steps or time."""
        if self.unit == "samples":
            return math.ceil(self.amount)
        if self.unit == "tokens":
            return math.ceil(self.amount / seq_len)
        if self.unit == "epochs" and epoch_samples is not None:
            return math.ceil(self.amount * epoch_samples)
        return None

    def exact_samples(self, batches: Batches, *, seq_len: int, epoch_samples: int | None = None) -> float | None:
        """Number of samples in this duration, not rounded, or None if the unit is time or the epoch's size is not known."""
        if self.unit == "steps":
            return batches.samples(math.ceil(self.amount))
        if self.unit == "tokens":
            return self.amount / seq_len
        if self.unit == "epochs":
            return None if epoch_samples is None else self.amount * epoch_samples
        return self.amount if self.unit == "samples" else None

    def steps(
        self, batches: Batches, *, seq_len: int, epoch_samples: int | None = None, until: int | None = None
    ) -> int | None:
        """Number of optimiser steps that cover this duration, rounded up, or None if the unit is time.

        The steps are the first ones of a run, or the last ones of a run of `until` steps. With a batch ramp the last steps have
        more samples.
        """
        if self.unit == "steps":
            return math.ceil(self.amount)
        samples = self.samples(seq_len=seq_len, epoch_samples=epoch_samples)
        if samples is None:
            return None
        return batches.steps(samples) if until is None else batches.steps_before(until, samples)


def parse_count(value: Any) -> Any:
    """Parse a count: `20B` -> 20_000_000_000. Numbers pass through; other types are left for the schema to refuse."""
    if isinstance(value, str):
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a count: write 20000000000, 20e9 or 20B (K, M, B, T)")
        value = _number(match[1]) * _MULTIPLES[match[2].upper()]
    if isinstance(value, bool):
        raise ValueError("a count was expected, not true or false")
    if isinstance(value, float | Decimal):
        if value % 1:
            raise ValueError("a count must be a whole number")
        value = int(value)
    return value


def parse_duration(value: Any) -> Duration:
    if isinstance(value, Duration):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a duration: {DURATION_HELP}")
    if isinstance(value, int | float):
        value = str(value)
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a duration: {DURATION_HELP}")
    multiple, suffix = match[2].upper(), (match[3] or "").lower()
    if multiple == "M" and suffix == "" and match[2] == "m":
        raise ValueError("'m' could be minutes or millions: write 30min or 30M")
    amount = float(_number(match[1]) * _MULTIPLES[multiple])
    if suffix in _SECONDS:
        return _positive(Duration(amount * _SECONDS[suffix], "seconds"))
    unit = {text: unit for unit, text in LENGTH_UNITS.items()}.get(suffix)
    if unit is None:
        # A bare 500 is steps. A bare 20B can only be tokens.
        unit = "tokens" if multiple else "steps"
    if unit == "steps" and amount != int(amount):
        raise ValueError("a number of steps must be whole")
    return _positive(Duration(amount, unit))


def parse_time(value: Any) -> Duration:
    """Parse a wall-clock duration: `30min`, `12h`, `7d`."""
    duration = parse_duration(value)
    if duration.unit != "seconds":
        raise ValueError("not a time: write 30min, 12h or 7d")
    return duration


def parse_duration_or_none(value: Any) -> Duration:
    """Parse a duration that may be 0 (no warmup)."""
    if not isinstance(value, bool) and value in (0, "0", "0ba"):
        return Duration(0.0, "steps")
    return parse_duration(value)


def parse_seconds(value: Any) -> Any:
    """Parse seconds: `45s`, `2min`. A bare number is seconds."""
    if not isinstance(value, str):
        return refuse_bool(value)
    duration = parse_duration(value if value.strip()[-1:].isalpha() else f"{value}s")
    if duration.unit != "seconds":
        raise ValueError("not a time: write 45s, 2min or 1h")
    return duration.amount


def _number(text: str) -> Decimal:
    """Parse a number as a Decimal, so that 16.1K is exactly 16,100 and not a little less."""
    number = Decimal(text.replace("_", "").replace(",", ""))
    if number.adjusted() > 18:
        raise ValueError("the number is too large: it must be below 10^19")
    return number


def _positive(duration: Duration) -> Duration:
    if duration.amount <= 0:
        raise ValueError("must be more than 0")
    return duration


def parse_bytes(value: Any) -> Any:
    """Parse a size in bytes: `200GB` -> 200_000_000_000, `64MiB` -> 67_108_864."""
    if not isinstance(value, str):
        return refuse_bool(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", value.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("not a size: write 200GB or 64MiB")
    power = "KMGT".find(match[2].upper()) + 1 if match[2] else 0
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** power)


def refuse_bool(value: Any) -> Any:
    """Raise for a boolean. Python counts True as 1, but `layers: true` in a run spec is a mistake, not one layer."""
    if isinstance(value, bool):
        raise ValueError("a number was expected, not true or false")
    return value


MOST_LAYERS = 10_000
# Sums and products of a few numbers up to this one are still finite floats.
LARGEST_NUMBER = 1e30
# The bounds come before the validator, so that they are in the JSON Schema too.
NotBool = BeforeValidator(refuse_bool)
Whole = Annotated[int, Field(ge=0, lt=2**63), NotBool]
Positive = Annotated[int, Field(ge=1, le=2**31), NotBool]
# The number of layers of a model.
Depth = Annotated[int, Field(ge=1, le=MOST_LAYERS), NotBool]
# A multiple that a size is padded to. A larger one would be mostly padding.
Multiple = Annotated[int, Field(ge=1, le=65_536), NotBool]
PositiveNumber = Annotated[float, Field(gt=0, le=LARGEST_NUMBER), NotBool]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST_NUMBER), NotBool]
Fraction = Annotated[float, Field(ge=0, lt=1), NotBool]
Count = Annotated[
    int,
    Field(ge=1, le=10**18),
    BeforeValidator(parse_count),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\d[\d_,.]*(e\d+)?\s*[KMBTkmbt]?$"},
            ]
        }
    ),
]
Bytes = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(parse_bytes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^[\d.]+\s*[KMGTkmgt]?i?B?$"}]}
    ),
]
Seconds = Annotated[
    float,
    Field(ge=0),
    BeforeValidator(parse_seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^[\d.]+\s*(s|min|h|d)?$"}]}
    ),
]
_duration_text = PlainSerializer(str, return_type=str)
_duration_schema = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]})
DurationField = Annotated[Duration, BeforeValidator(parse_duration), _duration_text, _duration_schema]
DurationOrNone = Annotated[Duration, BeforeValidator(parse_duration_or_none), _duration_text, _duration_schema]
TimeField = Annotated[Duration, BeforeValidator(parse_time), _duration_text, _duration_schema]
DurationOrAuto = Annotated[
    Duration | Literal["auto"],
    BeforeValidator(lambda value: value if value == "auto" else parse_duration(value)),
    _duration_text,
    _duration_schema,
]
DurationOrNull = Annotated[
    Duration | None,
    BeforeValidator(lambda value: None if value is None else parse_duration(value)),
    PlainSerializer(lambda value: None if value is None else str(value), return_type=str | None),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}]}),
]

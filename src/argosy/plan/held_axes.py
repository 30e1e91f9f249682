"""The axes of a layout that a user holds (`argosy plan --what-if tp=4,recompute=full`)."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from argosy.config.refusals import did_you_mean
from argosy.errors import ArgosyError
from argosy.plan.layouts import Layout, Recompute, Schedule

CHOICES: dict[str, tuple[str, ...]] = {"recompute": get_args(Recompute), "schedule": get_args(Schedule)}


def held_axes(text: str | None) -> dict[str, object]:
    """Return the values of a layout's fields that a text such as `tp=4,recompute=full` names."""
    # Argosy has no separate tensor parallelism for experts.
    axes = [*(field.name for field in fields(Layout) if field.name != "etp"), "dp_replicate", "dp_shard"]
    fixed: dict[str, object] = {}
    for part in [part for part in (text or "").replace(" ", ",").split(",") if part]:
        name, _, value = part.partition("=")
        if name not in axes or not value:
            hint = did_you_mean(name, axes) or f"axes are {', '.join(axes)}"
            raise ArgosyError(
                "plan.bad-question",
                f"{part!r} is not an axis and a value: {hint}",
                key="--what-if",
                value=text,
                fix="write tp=4",
            )
        if name == "sp":
            fixed[name] = value.lower() in ("1", "true", "yes")
        elif name in CHOICES:
            if value not in CHOICES[name]:
                raise ArgosyError(
                    "plan.bad-question",
                    f"{name} is one of {', '.join(CHOICES[name])}, not {value!r}",
                    key="--what-if",
                    value=text,
                    fix=f"write {name}={CHOICES[name][0]}",
                )
            fixed[name] = value
        elif value.isdecimal() and int(value) > 0:
            fixed[name] = int(value)
        else:
            raise ArgosyError(
                "plan.bad-question",
                f"{name} is a whole number above 0, not {value!r}",
                key="--what-if",
                value=text,
                fix="write tp=4",
            )
    return _data_parallel(fixed)


def _data_parallel(fixed: dict[str, object]) -> dict[str, object]:
    """Replace the run spec's dp_replicate and dp_shard by the fields of a layout. One that is not given is 1, as in a run spec."""
    given = {key: fixed.pop(key) for key in ("dp_replicate", "dp_shard") if key in fixed}
    if not given:
        return fixed
    copies, shard = int(str(given.get("dp_replicate", 1))), int(str(given.get("dp_shard", 1)))
    return fixed | {"dp": copies * shard, "zero": 3 if shard > 1 else 0, "copies": copies if shard > 1 else 1}

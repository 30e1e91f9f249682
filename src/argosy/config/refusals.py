"""The conversion of pydantic's validation errors to one refusal that names the key, its origin and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from argosy.config.other_names import OTHER_NAMES, OTHER_VALUES
from argosy.config.schema import RunSpec
from argosy.config.secrets import WEBHOOK
from argosy.errors import ArgosyError
from argosy.families.family_registry import PRESETS


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class inside an annotation such as `EvalSpec | None` or `list[DataSource]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := section_of(argument)) is not None:
            return found
    return None


def refusal_of(error: ValidationError, origins: dict[str, str], prefix: str = "") -> ArgosyError:
    """Convert a pydantic ValidationError to one ArgosyError.

    Misspelt keys come first, because they also make other keys look missing. A key the user wrote comes before a key that was
    derived from it.
    """
    order = {"extra_forbidden": 0, "missing": 2}

    def rank(item: Any) -> tuple[int, bool]:
        origin = _origin_of(_dotted(item["loc"], prefix), origins) or ""
        return order.get(item["type"], 1), origin.startswith("derived")

    found = sorted(error.errors(), key=rank)
    first = found[0]
    if first["type"] not in order:
        # A wrong value also makes the keys that would be derived from it look missing.
        found = [item for item in found if item["type"] != "missing"]
    key = _dotted(first["loc"], prefix)
    cause, fix, code = _explain(first, key)
    if key in ("model", "model.moe") and first["type"] == "value_error":
        key = _culprit(cause, key, origins)
    if others := [f"{_dotted(item['loc'], prefix)}: {_explain(item, '')[0]}" for item in found[1:6]]:
        cause += "\nalso: " + "\n      ".join(others)
    value = None if first["type"] in ("missing", "extra_forbidden", "value_error") else first.get("input")
    if key == WEBHOOK or (isinstance(value, dict | list) and len(str(value)) > 100):
        value = None
    return ArgosyError(code, cause, key=key or None, value=value, origin=_origin_of(key, origins), fix=fix)


def _culprit(cause: str, section: str, origins: dict[str, str]) -> str:
    """Return the key that a refusal about a section should name: the one the user wrote, among those in the message."""
    known = _keys_of(section)
    named = [f"{section}.{word}" for word in re.findall(r"[a-z_]+", cause) if word in known]
    written = [key for key in named if not origins.get(key, "preset").startswith(("preset", "family", "derived"))]
    return (written or named or [section])[0]


def _explain(item: Any, key: str) -> tuple[str, str, str]:
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    name = str(item["loc"][-1]) if item["loc"] else ""
    if kind == "extra_forbidden":
        section = key.rpartition(".")[0]
        known = _keys_of(section)
        fix = _inside(name, item["input"], known, section) or _by_another_name(name)
        fix = fix or did_you_mean(name, known, section) or _elsewhere(name)
        fix = fix or f"known here: {', '.join(sorted(known))}"
        return f"{name!r} is not a key of {section or 'the run spec'}", fix, "config.unknown-key"
    if kind == "missing" and isinstance(item["loc"][-1], int):
        return (
            f"the list is too short: it has no item {name}, counted from 0",
            _meaning(key.rpartition(".")[0]),
            "config.bad-value",
        )
    if kind == "too_short":
        return "the list is empty", "give at least one", "config.bad-value"
    if kind == "literal_error":
        known = [part.strip(" '") for part in re.split(r",| or ", item["ctx"]["expected"])]
        given = str(item["input"])
        close = _preset_of(given) if key == "model.family" else None
        close = close or OTHER_VALUES.get((key, given.lower()))
        close = close or did_you_mean(given, known, cutoff=0.5) or "choose one of them"
        return f"{given!r} is not one of {', '.join(known)}", close, "config.bad-value"
    if kind == "string_pattern_mismatch":
        rule = "only letters, digits, '.', '_' and '-' are allowed, at most 63, starting with a letter or digit"
        return rule, "choose another", "config.bad-value"
    if kind == "missing":
        return f"{name} is required", f"add {key}", "config.missing-key"
    if kind == "value_error":
        code = "config.arithmetic" if item["loc"] and item["loc"][-1] in ("model", "moe") else "config.bad-value"
        head, _, fix = message.partition(": ")
        if key.startswith("eval."):
            fix = "; ".join(filter(None, (fix, "`eval: off` turns evaluation off")))
        return head, fix or "see `argosy config reference`", code
    if kind == "model_type" or kind == "model_attributes_type":
        return (
            f"{kind_of(item['input'])} was given where keys and values belong",
            "see `argosy config reference`",
            "config.bad-value",
        )
    # After the comma pydantic says how it tried to convert the input.
    wanted = message.removeprefix("Input ").partition(",")[0]
    return f"it {wanted}, not {kind_of(item['input'])}", _meaning(key), "config.bad-value"


def _inside(name: str, given: object, known: Sequence[str], section: str) -> str | None:
    """Suggest the whole key where its section is misspelt and a single key is given in it: optim.lr for `optm.lrr`."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    if not close or not isinstance(given, dict) or len(given) != 1:
        return None
    meant, [inner] = ".".join(filter(None, (section, close[0]))), given
    keys = _keys_of(meant)
    return f"did you mean {meant}.{inner}?" if inner in keys else did_you_mean(str(inner), keys, meant)


def _meaning(key: str) -> str:
    """Return a fix that quotes the key's description in the schema, or points to the reference if it has none."""
    described = _described(key)
    return f"change the value; {key}: {described}" if described else "see `argosy config reference`"


def _described(key: str) -> str:
    model: Any = RunSpec
    described = ""
    for part in key.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is not None:
            described, model = field.description or described, section_of(field.annotation)
    return described


def _keys_of(section: str) -> list[str]:
    model: Any = RunSpec
    for part in filter(None, section.split(".")):
        if not part.isdigit():
            model = section_of(model.model_fields[part].annotation)
    return [] if model is None else list(model.model_fields)


def is_key(key: str) -> bool:
    """True if the run spec has this dotted key, as a value or as a section."""
    model: Any = RunSpec
    for part in key.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = section_of(field.annotation)
    return True


def _by_another_name(name: str) -> str | None:
    ours = OTHER_NAMES.get(name.lower().replace("-", "_"))
    return f"here it is set by {ours}: {_described(ours)}" if ours else None


def _elsewhere(name: str) -> str | None:
    """Suggest the section a misplaced key belongs to: `lr` at the top level is optim.lr."""
    places = key_elsewhere(name)
    return f"did you mean {' or '.join(places)}?" if places else None


def key_elsewhere(name: str) -> list[str]:
    """Return the keys of this name in the sections of the run spec, such as optim.lr for `lr`."""
    return [f"{top}.{name}" for top in RunSpec.model_fields if _has_section(top) and name in _keys_of(top)]


def _has_section(top: str) -> bool:
    return section_of(RunSpec.model_fields[top].annotation) is not None


def _preset_of(family: str) -> str | None:
    """Suggest a preset for an unknown family. Many families are presets of another: mistral is a llama with a window."""
    close = difflib.get_close_matches(family.lower(), PRESETS, n=1, cutoff=0.7)
    return f"a preset has it: model.preset={close[0]}" if close else None


# The largest edit distance of a suggestion.
_FARTHEST = 2


def did_you_mean(word: str, known: Sequence[str], section: str = "", cutoff: float = 0.6) -> str | None:
    close = difflib.get_close_matches(word.lower(), known, n=2, cutoff=cutoff)
    near = [name for name in known if abs(len(name) - len(word)) <= _FARTHEST]
    close = close or [name for name in near if _distance(word.lower(), name) <= min(_FARTHEST, len(word) - 1)][:2]
    prefix = f"{section}." if section else ""
    return f"did you mean {' or '.join(prefix + c for c in close)}?" if close else None


def _distance(word: str, other: str) -> int:
    """Return the edit distance: letters to insert, delete or replace, and neighbours to swap."""
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(word, 1):
        row = [i]
        for j, target in enumerate(other, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != target))
            if i > 1 and j > 1 and (letter, target) == (other[j - 2], word[i - 2]):
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def _dotted(location: tuple[int | str, ...], prefix: str) -> str:
    return ".".join(str(part) for part in ((prefix, *location) if prefix else location))


def _origin_of(key: str, origins: dict[str, str]) -> str | None:
    whole = key
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return next((origin for known, origin in origins.items() if known.startswith(f"{whole}.")), None)


def kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a set of keys"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"the text {value!r}" if isinstance(value, str) else f"the number {value}"

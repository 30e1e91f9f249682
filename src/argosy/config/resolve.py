"""Resolution of a run.yaml and command-line overrides to one checked `RunSpec`, with the origin of every value.

Values are layered: the family's structure, the preset's sizes, the file, the command line. Missing values are derived from the
others. Each leaf remembers its layer, so that `argosy config show` can print it and a refusal can point at the line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from argosy.config.checks import check
from argosy.config.corpus_vocabulary import corpus_vocabulary
from argosy.config.default_micro_batch import FINAL, default_micro_batch, origin_of_default, with_micro_batch
from argosy.config.model import ModelSpec
from argosy.config.overrides import OFF, OVERRIDDEN, Override, as_yaml, read_override, set_key
from argosy.config.refusals import did_you_mean, kind_of, refusal_of, section_of
from argosy.config.schema import RunSpec
from argosy.config.secrets import without_secrets
from argosy.config.stage_layers import SEVERAL_STAGES
from argosy.config.start import HF, check_start, remembered_model, starting_model
from argosy.config.units import LENGTH_KEYS
from argosy.config.yaml_reader import parse_value, read_yaml
from argosy.errors import ArgosyError
from argosy.families.experts import BALANCE_RULE
from argosy.families.family_registry import ALIASES, FAMILIES, PRESETS
from argosy.tasks.task_registry import section_for

Tree = dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A checked run spec. `origins` maps each dotted leaf to where its value came from."""

    spec: RunSpec
    origins: dict[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (dotted key, value, origin) for every leaf, without secrets."""
        for key, value in flatten(without_secrets(self.spec.model_dump(mode="json"))):
            yield key, value, self.origins[key]


def resolve(
    source: Path | Mapping[str, Any] | None, overrides: Sequence[Override] = (), *, elsewhere: bool = False
) -> Resolved:
    """Resolve a run.yaml, or the same keys as a dict, with overrides.

    Args:
        source: the run.yaml, its keys as a dict, or None for overrides alone.
        overrides: `train.steps=100`, as on the command line, or `("train.steps", 100)`. Later ones win.
        elsewhere: the run's files are on another machine, so the model named by `init_from` is not read or compared.

    Raises:
        ArgosyError: with the key, its origin and a fix.
    """
    tree, origins = _read(source)
    _expand_shorthands(tree)
    for override in overrides:
        _apply_override(tree, origins, override)
    start = None if elsewhere and tree.get("model") is not None else _start(tree, origins)
    _expand_model(tree, origins, start)
    _derive(tree, origins)
    try:
        spec = RunSpec.model_validate({key: None if value is OFF else value for key, value in tree.items()})
    except ValidationError as error:
        raise refusal_of(error, origins) from None
    if origins.get("parallel.micro_batch") == FINAL:
        spec = with_micro_batch(spec, default_micro_batch(spec))
        origins["parallel.micro_batch"] = origin_of_default(spec)
    leaves = dict(flatten(spec.model_dump(mode="json")))
    for key, value in leaves.items():
        written_short = _shorthand_origin(key, origins) if value is not None else None
        origins.setdefault(key, written_short or ("derived" if _has_no_default(key) else "default"))
    check(spec, origins)
    if start is not None:
        check_start(spec.model, start, origins)
    return Resolved(spec, {key: origins[key] for key in leaves})


def resolve_model(model: str | Tree, overrides: Sequence[Override] = ()) -> ModelSpec:
    """Resolve a model alone, for commands that need no run: a preset's name or the keys of a model, and overrides."""
    tree: Tree = {"model": {"preset": model} if isinstance(model, str) else dict(model)}
    origins: dict[str, str] = {}
    for override in overrides:
        inside = f"model.{override}" if isinstance(override, str) else (f"model.{override[0]}", override[1])
        _apply_override(tree, origins, inside)
    _expand_model(tree, origins)
    try:
        return ModelSpec.model_validate(tree["model"])
    except ValidationError as error:
        raise refusal_of(error, origins, prefix="model") from None


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf. An empty list or a list of plain values is one leaf."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for index, item in enumerate(tree):
            yield from flatten(item, f"{prefix}.{index}")
    else:
        yield prefix, tree


def _read(source: Path | Mapping[str, Any] | None) -> tuple[Tree, dict[str, str]]:
    if source is None:
        return {}, {}
    if isinstance(source, Mapping):
        given: Tree = as_yaml(source)
        return given, {key: "python" for key, _ in flatten(given)}
    path = source
    tree, lines = read_yaml(path)
    if not tree:
        raise ArgosyError("config.bad-yaml", f"{path} is empty", fix="start with `model: gpt2`")
    if not isinstance(tree, dict):
        raise ArgosyError(
            "config.bad-yaml", f"{path} holds {kind_of(tree)}, not keys and values", fix="start with `model: gpt2`"
        )
    return tree, {key: f"{path.name}:{line}" for key, line in lines.items()}


def _expand_shorthands(tree: Tree) -> None:
    """Replace shorthands by their long forms, in place.

    The shorthands are `model: gpt2`, `data: {train: corpus}`, `parallel: auto`, `eval: off`, `guard: off`, `storage: claim`.
    """
    if isinstance(tree.get("model"), str):
        tree["model"] = {"preset": tree["model"]}
    data = tree.get("data")
    if isinstance(data, dict):
        for key in ("train", "validation"):
            if isinstance(data.get(key), str | dict):
                data[key] = [data[key]]
            if isinstance(data.get(key), list):
                data[key] = [{"path": item} if isinstance(item, str) else item for item in data[key]]
        # Megatron writes the split as 98,2,0.
        if isinstance(data.get("split"), str):
            data["split"] = [parse_value(part, "data.split") for part in data["split"].split(",")]
    cluster = tree.get("cluster")
    if isinstance(cluster, dict) and isinstance(cluster.get("storage"), str):
        cluster["storage"] = {"claim": cluster["storage"]}
    # An empty section means the same as a section that is not given.
    for section in ("eval", "guard", "fault", "checkpoint", "log", "parallel"):
        if section in tree and tree[section] is None and section not in _turned_off(tree):
            del tree[section]
    if tree.get("parallel", "auto") == "auto":
        tree["parallel"] = {}
    for section in ("eval", "guard"):
        switch = tree.get(section)
        if isinstance(switch, bool | str):
            if str(switch).lower() in ("off", "no", "false"):
                tree[section] = OFF
            elif str(switch).lower() in ("on", "yes", "true"):
                tree[section] = {}


def _turned_off(tree: Tree) -> list[str]:
    return [key for key, value in tree.items() if value is OFF]


def _apply_override(tree: Tree, origins: dict[str, str], override: Override) -> None:
    key, value, origin = read_override(override)
    node = set_key(tree, key, value)
    # A length in an override replaces the file's, whatever its unit.
    if key in LENGTH_KEYS and value is not None:
        for other in LENGTH_KEYS:
            if (
                other != key
                and origins.get(other) not in OVERRIDDEN
                and node.get(other.removeprefix("train.")) is not None
            ):
                node[other.removeprefix("train.")] = None
                origins[other] = f"replaced by {key}"
    for known in [k for k in origins if k == key or k.startswith(key + ".")]:
        del origins[known]
    for leaf, _ in flatten(value, key):
        origins[leaf] = origin
    origins[key] = origin
    _expand_shorthands(tree)


def _expand_model(tree: Tree, origins: dict[str, str], start: ModelSpec | None = None) -> None:
    """Merge the user's model keys over the preset's sizes and the family's structure, or over the `init_from` model."""
    user = tree.get("model")
    if start is not None and (user is None or (isinstance(user, dict) and not user.keys() & {"preset", "family"})):
        _expand_start(tree, origins, start)
        return
    if not isinstance(user, dict):
        return
    preset, row = user.get("preset"), {}
    if preset is not None:
        preset = ALIASES.get(str(preset), str(preset))
        if preset not in PRESETS:
            raise ArgosyError(
                "config.unknown-preset",
                f"there is no model preset {preset!r}",
                key="model.preset",
                value=preset,
                origin=origins.get("model.preset") or origins.get("model"),
                fix=did_you_mean(preset, [*PRESETS, *ALIASES]) or "`argosy config models` lists them",
            )
        row = PRESETS[preset] | {"preset": preset}
    family = user.get("family", row.get("family"))
    base = FAMILIES[family].defaults if isinstance(family, str) and family in FAMILIES else {}
    tree["model"] = _merge_model(base | row, user) | ({"preset": preset} if preset is not None else {})
    for source, label in ((row, f"preset {preset}"), (base, f"family {family}")):
        for key, _ in flatten(source, "model"):
            if key != "model.preset":
                origins.setdefault(key, label)


def _merge_model(model: Tree, user: Tree) -> Tree:
    """Merge the user's keys over a model's keys. The nested sections `moe` and `retrieval` are merged key by key."""
    merged = model | user
    for section in ("moe", "retrieval"):
        if isinstance(model.get(section), dict) and isinstance(user.get(section), dict):
            merged[section] = model[section] | user[section]
    return merged


def _start(tree: Tree, origins: dict[str, str]) -> ModelSpec | None:
    """Return the model that `init_from` names, or None.

    If its files are gone, the model recorded in the run directory is used: a resume needs nothing else.
    """
    where = tree.get("init_from")
    if not isinstance(where, str):
        return None
    try:
        return starting_model(where)
    except ArgosyError as error:
        remembered = remembered_model(Path(str(tree.get("runs_dir", "runs"))) / str(tree.get("name", "run")), where)
        if remembered is not None:
            return remembered
        error.key, error.value, error.origin = error.key or "init_from", error.value or where, origins.get("init_from")
        raise


def _expand_start(tree: Tree, origins: dict[str, str], start: ModelSpec) -> None:
    base = start.model_dump(mode="json", exclude_none=True)
    tree["model"] = _merge_model(base, tree.get("model") or {})
    from_hub = str(tree.get("init_from")).startswith(HF)
    for key, _ in flatten(base, "model"):
        converted = from_hub and key == "model.moe.balance_loss"
        origins.setdefault(key, f"init_from: {BALANCE_RULE}" if converted else "init_from")


def _derive(tree: Tree, origins: dict[str, str]) -> None:
    """Fill in keys that follow from other keys, in place. Values of a wrong type are left for the schema to refuse."""
    model, data, optim = (tree.get(key) for key in ("model", "data", "optim"))
    if isinstance(model, dict) and isinstance(data, dict):
        if data.get("seq_len") is None and _as_number(model.get("max_seq_len")) is not None:
            data["seq_len"] = model["max_seq_len"]
            origins["data.seq_len"] = "derived: model.max_seq_len"
        elif model.get("max_seq_len") is None and _as_number(data.get("seq_len")) is not None:
            model["max_seq_len"] = data["seq_len"]
            origins["model.max_seq_len"] = "derived: data.seq_len"
        if model.get("vocab_size") is None and (known := corpus_vocabulary(data)) is not None:
            model["vocab_size"], corpus = known
            origins["model.vocab_size"] = f"derived: the tokenizer of {corpus}"
        if data.get("validation") and data.get("split") is None:
            data["split"] = [1, 0, 0]
            origins["data.split"] = "derived: data.validation"
        if (section := section_for(model, data.get("task"))) is not None and data.get(section) is None:
            data[section] = {}
    if isinstance(optim, dict) and optim.get("min_lr") is None and (lr := _as_number(optim.get("lr"))) is not None:
        optim["min_lr"] = lr / 10
        origins["optim.min_lr"] = "derived: optim.lr / 10"
    parallel = tree.get("parallel")
    if isinstance(parallel, dict):
        _derive_layout(parallel, origins)


def _derive_layout(parallel: Tree, origins: dict[str, str]) -> None:
    if parallel.get("micro_batch") in (None, "auto"):
        # `resolve` replaces it once the other keys are validated.
        parallel["micro_batch"] = 1
        origins["parallel.micro_batch"] = FINAL
    if (_as_number(parallel.get("pp")) or 1) <= 1:
        return
    if parallel.get("vpp") is None and parallel.get("schedule") in SEVERAL_STAGES:
        parallel["vpp"] = 2
        origins["parallel.vpp"] = "derived: parallel.schedule"
    # With reshard, FSDP would all-gather the parameters again for each micro-batch.
    if parallel.get("reshard") is None:
        parallel["reshard"] = False
        origins["parallel.reshard"] = "derived: parallel.pp"


def _shorthand_origin(key: str, origins: dict[str, str]) -> str | None:
    """Return the origin of a value written as a shorthand, such as `model: gpt2` or `data: {train: corpus}`."""
    if key == "model.preset":
        return origins.get("model")
    if key == "cluster.storage.claim":
        return origins.get("cluster.storage")
    if key.startswith(("data.train.", "data.validation.")) and key.endswith(".path"):
        place = key.removesuffix(".path")
        return origins.get(place) or origins.get(place.rpartition(".")[0])
    return None


def _has_no_default(key: str) -> bool:
    field: Any = None
    model: Any = RunSpec
    for part in key.split("."):
        if part.isdigit():
            continue
        # Below a mapping there are no fields.
        field = None if model is None else model.model_fields.get(part)
        if field is None:
            return False
        model = section_of(field.annotation)
    return field is not None and field.is_required()


def _as_number(value: Any) -> float | None:
    """Return a value as the schema would read a number, or None. A wrong value is left for the schema to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None

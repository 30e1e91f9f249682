"""Convert Hugging Face's config.json to a model spec and back, without torch or transformers.

A key that affects what a model computes, or how it is trained, is either converted or refused by name and value. Keys without
effect are on an explicit list with the reason. A missing key has the default of transformers' own config class. A config that
we write is read back, and every key that changes on the way cannot be exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.family import HfFormat, Tree
from argosy.families.family_registry import FAMILIES, family_of
from argosy.families.hf_keys import Keys
from argosy.untrusted import read_object

CONFIG = "config.json"
# Keys without effect on what a trained model computes. An export may lose them, and reports it.
TRAINING_ONLY = frozenset({"preset", "dropout", "embed_noise", "init_std", "pair", "moe.z_loss"})


FORMATS: dict[str, HfFormat] = {
    kind: hf_format for family in FAMILIES.values() for kind, hf_format in family.formats.items()
}


def model_type_of(spec: ModelSpec) -> str:
    """Return Hugging Face's name for the kind of model a spec describes."""
    return family_of(spec).model_type(spec)


def read_config(directory: Path) -> Tree:
    """Return the config.json of a Hugging Face model directory."""
    path = directory / CONFIG
    try:
        return read_object(path, within=directory)
    except FileNotFoundError:
        is_there = directory.is_dir()
        raise ArgosyError(
            "hf.bad-files",
            f"{directory} has no {CONFIG}" if is_there else f"there is no directory {directory}",
            fix="give the directory of a downloaded model, with config.json and *.safetensors"
            + ("" if is_there else f": `hf download OWNER/NAME --local-dir {directory}` fetches one from the Hub"),
        ) from None
    except (OSError, ValueError) as error:
        raise ArgosyError("hf.bad-files", f"{path} cannot be read: {error}", fix="fetch it again") from None


def from_config(document: Mapping[str, Any], where: str = CONFIG) -> ModelSpec:
    """Return the model spec of a config.json.

    Raises:
        ArgosyError: a key cannot be represented; the message names it.
    """
    keys = Keys(document, where)
    kind = keys.take("model_type", None)
    if not isinstance(kind, str) or kind not in FORMATS:
        raise keys.refuse(
            "model_type", kind, f"Argosy knows {', '.join(FORMATS)}", fix="choose a model of one of these"
        )
    tree = FORMATS[kind].read(keys)
    keys.finish()
    base = FAMILIES[tree["family"]].defaults
    try:
        return ModelSpec.model_validate(base | {key: value for key, value in tree.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ArgosyError(
            "hf.bad-files",
            f"{where} describes no model: {place} {first['msg'].removeprefix('Value error, ')}".replace("  ", " "),
            fix="check the file against the model it came with",
        ) from None


def key_fates(kind: str) -> dict[str, str]:
    """Return how each key of a `model_type` is handled: "read", "held" to what we compute, or why it is ignored."""
    keys = Keys({"model_type": kind}, CONFIG)
    FORMATS[kind].read(keys)
    keys.finish()
    return keys.fates


def to_config(spec: ModelSpec) -> Tree:
    """Return the config.json of a model, without the keys that only its weights and tokenizer determine.

    Raises:
        ArgosyError: the config cannot represent a key of the spec that affects what the model computes.
    """
    kind = model_type_of(spec)
    document = {"model_type": kind, **FORMATS[kind].write(spec)}
    gap = {key: pair for key, pair in export_gap(spec, document).items() if key not in TRAINING_ONLY}
    if gap:
        key, (ours, theirs) = next(iter(gap.items()))
        raise ArgosyError(
            "hf.unsupported",
            f"Hugging Face's {kind} has no way to say {key} = {ours!r}; it would load as {theirs!r}"
            + (f"; the same holds for {', '.join(list(gap)[1:])}" if gap.keys() - {key} else ""),
            key=f"model.{key}",
            value=ours,
            fix="only models that one of their classes computes can be exported",
        )
    return document


def is_exportable(spec: ModelSpec) -> bool:
    """Return whether one of transformers' classes computes what the model does. Adapters are merged into the weights."""
    try:
        to_config(spec.model_copy(update={"lora": None}))
    except ArgosyError:
        return False
    return True


def export_gap(spec: ModelSpec, document: Tree) -> dict[str, tuple[Any, Any]]:
    """Return the keys of the spec that a config does not preserve, each with our value and the value read back."""
    read = from_config(document)
    ours, back, same = leaves(spec.model_dump()), leaves(read.model_dump()), same_meanings(spec, read)
    gap = {key: (ours[key], back.get(key)) for key in ours if ours[key] != back.get(key) and key not in same}
    if spec.moe is not None and not spec.moe.dense_layers:
        # No layer has a dense MLP.
        gap.pop("ffn", None)
    return gap


def same_meanings(one: ModelSpec, other: ModelSpec) -> frozenset[str]:
    """Return the keys with which both models compute the same, though one may leave out what the other writes."""
    here, there = _spelled_out(one), _spelled_out(other)
    return frozenset(key for key in here.keys() & there.keys() if here[key] == there[key])


def _spelled_out(spec: ModelSpec) -> Tree:
    """Return the values that a model computes with where keys are left out because others give them."""
    found: Tree = {}
    if spec.architecture == "decoder":
        found["query_pre_attn_scalar"] = spec.query_pre_attn_scalar or spec.head_dim
    if spec.window is not None:
        # One beyond the last layer: none is global.
        found["global_every"] = min(spec.global_every or spec.layers + 1, spec.layers + 1)
    # A base of their own takes layers with a window out of the scaling.
    if spec.window is not None and spec.rope_scaling is None:
        found["local_rope_theta"] = spec.local_rope_theta or spec.rope_theta
    return found


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Return the keys of a spec with those of its sections flattened to dotted names."""
    found: Tree = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found

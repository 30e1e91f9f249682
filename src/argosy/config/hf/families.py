"""Which reader and writer a model has, and whether a model of ours can be written at all: what is written is read back,
and whatever came out different has no place in their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from argosy.config.hf import decoders, encoders, experts
from argosy.config.hf.keys import Keys
from argosy.config.model import ModelSpec
from argosy.config.presets import FAMILIES
from argosy.errors import ArgosyError
from argosy.untrusted import read_object

Tree = dict[str, Any]
CONFIG = "config.json"
# Of no effect on what a trained model computes: an export may lose them, and says so.
TRAINING_ONLY = frozenset({"preset", "dropout", "init_std", "pair", "moe.z_loss"})


@dataclass(frozen=True)
class _Family:
    read: Callable[[Keys], Tree]
    write: Callable[[ModelSpec], Tree]


_FAMILIES = {
    "gpt2": _Family(decoders.read_gpt2, decoders.write_gpt2),
    "llama": _Family(decoders.read_llama, decoders.write_llama),
    "mistral": _Family(decoders.read_mistral, decoders.write_mistral),
    "qwen3": _Family(decoders.read_qwen3, decoders.write_qwen3),
    "mixtral": _Family(experts.read_mixtral, experts.write_mixtral),
    "qwen3_moe": _Family(experts.read_qwen3_moe, experts.write_qwen3_moe),
    "mpt": _Family(decoders.read_mpt, decoders.write_mpt),
    "bert": _Family(encoders.read_bert, encoders.write_bert),
    "t5": _Family(encoders.read_t5, encoders.write_t5),
}


def model_type_of(spec: ModelSpec) -> str:
    """Their name for the kind of model a spec describes."""
    if spec.family != "llama":
        return "gpt2" if spec.family == "gpt" else spec.family
    if spec.moe is not None:
        return "qwen3_moe" if spec.qk_norm else "mixtral"
    if spec.qk_norm:
        return "qwen3"
    return "mistral" if spec.window is not None else "llama"


def read_config(directory: Path) -> Tree:
    """config.json of a Hugging Face model directory."""
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
    """The model spec of a config.json, or a refusal that names the key that cannot be represented."""
    keys = Keys(document, where)
    kind = keys.take("model_type", None)
    if kind not in _FAMILIES:
        raise keys.refuse(
            "model_type", kind, f"Argosy knows {', '.join(_FAMILIES)}", fix="choose a model of one of these"
        )
    tree = _FAMILIES[kind].read(keys)
    keys.finish()
    base = FAMILIES[tree["family"]]
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
    """Return what becomes of each key of a kind of config: "read", "held" to what we compute, or why it is ignored."""
    keys = Keys({"model_type": kind}, CONFIG)
    _FAMILIES[kind].read(keys)
    keys.finish()
    return keys.fates


def to_config(spec: ModelSpec) -> Tree:
    """config.json of a model, without what only its weights and tokenizer know; a refusal where it would not say all."""
    kind = model_type_of(spec)
    if kind not in _FAMILIES:
        raise ArgosyError("hf.unsupported", f"a {kind} model cannot be exported", key="model", fix="export another")
    document = {"model_type": kind, **_FAMILIES[kind].write(spec)}
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


def export_gap(spec: ModelSpec, document: Tree) -> dict[str, tuple[Any, Any]]:
    """Keys of the spec that a config does not say: (ours, what it would be read back as)."""
    ours, back = leaves(spec.model_dump()), leaves(from_config(document).model_dump())
    gap = {key: (value, back.get(key)) for key, value in ours.items() if value != back.get(key)}
    if spec.moe is not None and not spec.moe.dense_layers:
        gap.pop("ffn", None)  # no layer has it
    return gap


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """The keys of a spec and, dotted, those of its parts."""
    found: Tree = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found

"""The start of a run (`init_from`): read the model stored there and compare it with the run's own model.

The start is a Hugging Face directory (`hf:DIR`), a run, one checkpoint of a run, or a directory made by `argosy ckpt import`.
This module reads only descriptions; `argosy.checkpoint.source` reads the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import ENCODER, RETRIEVER, architecture_of
from argosy.families.hf_config import from_config, leaves, read_config, same_meanings
from argosy.untrusted import read_object

HF = "hf:"
MEGATRON = "megatron:"
# Describes an imported model, as resolved.json describes a run.
MODEL_FILE = "model.json"
RUN_FILE = "resolved.json"
# RUN/best stands for the checkpoint of a run with the lowest validation loss.
BEST = "best"

# Keys that change how a model is trained, but not what its weights mean.
_FREE = ("preset", "vocab_multiple", "dropout", "embed_noise", "init_std", "moe.balance_loss", "moe.z_loss")
# Keys that change what the weights compute. The user may set them on purpose, to train on longer sequences.
_STRETCH = ("rope_theta", "rope_scaling", "window")


def directory_of(source: str) -> Path:
    """Return the directory of a source with a prefix, as `hf:~/models/base`. No shell expands a `~` after a prefix."""
    # pathlib's expanduser raises if there is no such user.
    return Path(os.path.expanduser(source.partition(":")[2]))


def model_root(path: Path) -> Path:
    """Return the directory that describes a model's checkpoint: its own, or that of the run it belongs to."""
    above = path.parent.parent if path.parent.name == "checkpoints" else path.parent if path.name == BEST else None
    for root in (path, *([] if above is None else [above])):
        if (root / MODEL_FILE).exists() or (root / RUN_FILE).exists():
            return root
    known = sorted({p.parent.name for name in (RUN_FILE, MODEL_FILE) for p in path.parent.glob(f"*/{name}")})
    raise ArgosyError(
        "run.not-found",
        f"{path} is neither a run, nor a checkpoint of one, nor an imported model",
        fix=f"runs in {path.parent}: {', '.join(known)}"
        if known
        else f"give runs/<name>, runs/<name>/checkpoints/step-…, or {HF}DIR for a Hugging Face directory",
    )


def stored_description(root: Path) -> dict[str, Any]:
    """Return the JSON object that describes the run or the imported model in `root`."""
    path = root / (MODEL_FILE if (root / MODEL_FILE).exists() else RUN_FILE)
    try:
        return read_object(path, within=root)
    except (OSError, ValueError) as error:
        raise ArgosyError("run.damaged", f"{path} cannot be read: {error}", fix="restore it from a backup") from None


def starting_model(init_from: str) -> ModelSpec:
    """Return the model stored at `init_from`."""
    if init_from.startswith(HF):
        directory = directory_of(init_from)
        return from_config(read_config(directory), str(directory / "config.json"))
    if init_from.startswith(MEGATRON):
        raise ArgosyError(
            "config.bad-value",
            "a run cannot start from Megatron's files themselves",
            key="init_from",
            value=init_from,
            fix=f"argosy ckpt import {init_from} --to DIR, then init_from: DIR",
        )
    root = model_root(Path(init_from))
    document = stored_description(root)
    try:
        found = ModelSpec.model_validate(document["model"] if "model" in document else document["spec"]["model"])
        # Adapters are merged into the weights when these are read (`argosy.checkpoint.lora_weights`). Noise belonged to the run that
        # made them: a preference run would compare noisy answers with a reference that has none.
        return found.model_copy(update={"lora": None, "embed_noise": 0.0})
    except (KeyError, TypeError, ValidationError) as error:
        raise ArgosyError(
            "run.damaged", f"{root} describes no model: {error}", fix="restore it from a backup"
        ) from None


def remembered_model(run: Path, init_from: str) -> ModelSpec | None:
    """Return the model of a run that started from `init_from`, or None if it has no checkpoint yet."""
    if not (run / RUN_FILE).exists() or not any((run / "checkpoints").glob("step-*")):
        return None
    spec = stored_description(run).get("spec") or {}
    return ModelSpec.model_validate(spec["model"]) if spec.get("init_from") == init_from else None


def check_start(model: ModelSpec, start: ModelSpec, origins: dict[str, str]) -> None:
    """Refuse a model that would compute something else than the starting model with the same weights."""
    if becomes_towers(start, model):
        start = start.model_copy(update={key: getattr(model, key) for key in ("retrieval", "pair", "tied")})
    for key, ours, theirs in differences(model, start):
        top = key.partition(".")[0]
        written = not origins.get(f"model.{key}", "default").startswith(
            ("preset", "family", "derived", "default", "init_from")
        )
        if top in _STRETCH and written:
            continue
        raise ArgosyError(
            "config.conflict",
            f"init_from holds a model with {key} = {theirs!r}, this run asks for {ours!r}",
            key=f"model.{key}",
            value=ours,
            origin=origins.get(f"model.{key}"),
            fix="leave `model:` out to take it from there" + (", or write the key itself" if top in _STRETCH else ""),
        )


def becomes_towers(start: ModelSpec, model: ModelSpec) -> bool:
    """Return whether a plain encoder initialises the towers of a retriever. Its heads are then dropped."""
    return (architecture_of(start), architecture_of(model)) == (ENCODER, RETRIEVER)


def differences(model: ModelSpec, start: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value here, value there) for each difference that matters to the weights."""
    here, there, same = leaves(model.model_dump()), leaves(start.model_dump()), same_meanings(model, start)
    for key in sorted((here.keys() | there.keys()) - same):
        mine, theirs = here.get(key), there.get(key)
        more_rows = key == "vocab_size" and model.vocab_size > start.vocab_size
        longer = key == "max_seq_len" and model.positions != "learned"
        # New load-balancing biases begin at zero.
        levelled = key == "moe.bias_rate" and mine is not None
        if mine != theirs and key not in _FREE and not key.startswith("lora") and not (more_rows or longer or levelled):
            yield key, mine, theirs

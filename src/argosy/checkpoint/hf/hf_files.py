"""The weights of a Hugging Face directory, read tensor by tensor from one safetensors file or from shards with an index.

The files are checked against the model's weight table before any data is read: the error names a tensor that is missing, unexpected
or of another shape. Pickled weights are never opened.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from argosy.checkpoint.disk import hash_file
from argosy.checkpoint.hf.hf_convert import entries, to_ours, to_theirs
from argosy.checkpoint.tensors import TensorFile, TensorInfo, require_finite
from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.family_registry import family_of
from argosy.families.hf_config import from_config, read_config
from argosy.families.weight_table import Entry
from argosy.model.build import build_model
from argosy.untrusted import MIB, read_object, read_regular, resolve_inside

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FETCH = "fetch the model again"
# The most experts, of all layers, to make a weight table for if the files hold fewer tensors. Kimi K2 has 23,040.
_MOST_EXPERTS = 100_000


@dataclass(frozen=True)
class HfModel:
    """A model directory whose weights are complete.

    `unused` are stored tensors that the model does not need. `copied` maps tensors that are not stored to the tensors they equal.
    """

    directory: Path
    spec: ModelSpec
    # Entries by our parameter name.
    table: dict[str, Entry]
    files: list[TensorFile]
    # The file and the stored name of each tensor, by its Hugging Face name in the table.
    where: dict[str, tuple[TensorFile, str]]
    unused: list[str]
    copied: dict[str, str]

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """The shape and dtype of each of our parameters after conversion."""
        return {name: TensorInfo.of(self._shape(entry)) for name, entry in self.table.items()}

    def read(self, name: str) -> Tensor:
        """Read and convert one of our parameters."""
        entry = self.table[name]
        return to_ours(entry, {theirs: self.read_theirs(theirs) for theirs in entry.theirs})

    def read_theirs(self, name: str) -> Tensor:
        file, stored = self.where[name]
        return require_finite(f"{name} in {file.path.name}", file.read(stored), "hf.bad-files")

    def _shape(self, entry: Entry) -> Tensor:
        parts = {}
        for theirs in entry.theirs:
            file, stored = self.where[theirs]
            info = file.infos[stored]
            parts[theirs] = torch.empty(info.shape, dtype=info.dtype, device="meta")
        return to_ours(entry, parts)


def open_hf(directory: Path) -> HfModel:
    spec = from_config(read_config(directory), str(directory / "config.json"))
    files = [_opened(path, directory) for path in _paths(directory)]
    _require_size(spec, files)
    table = {entry.ours: entry for entry in entries(spec)}
    needed = {theirs: entry for entry in table.values() for theirs in entry.theirs}
    family = family_of(spec).stored
    where: dict[str, tuple[TensorFile, str]] = {}
    for file in files:
        for stored in file.infos:
            name = family.name_of(stored, needed.keys() | family.copies.keys())
            if name in where:
                raise _bad(f"{name} is in {where[name][0].path.name} and in {file.path.name}", _FETCH)
            where[name] = (file, stored)
    # A tied weight may be stored under either of its names.
    where |= {
        original: where[copy]
        for copy, original in family.copies.items()
        if copy in where and copy not in needed and original not in where
    }
    copied = {name: twin for name, twin in family.left_out.items() if name in needed and name not in where}
    where |= {name: where[twin] for name, twin in copied.items() if twin in where}
    if missing := [name for name in needed if name not in where]:
        together = any(name.endswith(".experts.gate_up_proj") for name in where)
        fix = "its experts are stored together: transformers' save_pretrained, as it is, writes them one by one"
        raise _bad(f"{directory} lacks {_some(missing)}, which its config.json asks for", fix if together else _FETCH)
    others = [name for name in where if name not in needed]
    unknown = [name for name in others if name not in family.copies and not family.may_lack(name)]
    if unknown:
        raise _bad(
            f"{directory} holds {_some(unknown)}, which a {spec.family} model of its config.json does not have",
            "check config.json (layers, biases, tying); for adapters, merge them into the model first",
        )
    unused = [name for name in others if name not in family.copies]
    model = HfModel(directory, spec, table, files, where, unused, copied)
    _check_shapes(model)
    _check_copies(model, [name for name in others if name in family.copies])
    return model


def check_hashes(model: HfModel) -> int:
    """Compare each file with its published SHA-256, if the directory has it. Return the number of files compared."""
    checked = 0
    for path, promised in ((file.path, _promised_hash(file.path)) for file in model.files):
        if promised is None:
            continue
        found = hash_file(resolve_inside(path, model.directory), "sha256")
        if found != promised:
            raise _bad(f"{path} has SHA-256 {found[:16]}…, it was published with {promised[:16]}…", _FETCH)
        checked += 1
    return checked


def _promised_hash(path: Path) -> str | None:
    """Return the published SHA-256 of a file, or None.

    The Hub's cache names a large file by its SHA-256. A download into a directory stores it as the `etag`.
    """
    names = [os.path.basename(os.path.realpath(path))]
    note = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    with contextlib.suppress(OSError):
        names += read_regular(note, MIB, within=path.parent).decode(errors="replace").split()
    return next((name for name in names if re.fullmatch(r"[0-9a-f]{64}", name)), None)


def _paths(directory: Path) -> Iterator[Path]:
    # The single file takes precedence over an index, as in transformers.
    if os.path.lexists(directory / SINGLE):
        yield directory / SINGLE
    elif (directory / INDEX).exists():
        try:
            names = set(read_object(directory / INDEX, 256 * MIB, within=directory)["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _bad(f"{directory / INDEX} is not an index of shards: {error}", _FETCH) from None
        for name in sorted(names, key=str):
            if not isinstance(name, str) or Path(name).name != name:
                raise _bad(f"{directory / INDEX} names {name!r}, which is no file beside it", _FETCH)
            if not os.path.lexists(directory / name):
                raise _bad(f"{directory} lacks the shard {name}", _FETCH)
            yield directory / name
    elif pickled := sorted([*directory.glob("pytorch_model*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")]):
        raise _bad(
            f"{directory} keeps its weights in {pickled[0].name}, a pickle, which can run code when it is opened",
            "fetch the model's safetensors; or, if you trust its author, write them with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW_DIR)",
        )
    else:
        raise _bad(f"{directory} has neither {SINGLE} nor {INDEX}", _FETCH)


def _opened(path: Path, directory: Path) -> TensorFile:
    try:
        real = resolve_inside(path, directory)
    except OSError as error:
        raise _bad(f"{path} cannot be used: {error.strerror}", _FETCH) from None
    return TensorFile(path, code="hf.bad-files", fix=_FETCH, opened=real)


def _require_size(spec: ModelSpec, files: list[TensorFile]) -> None:
    """Refuse a model of far more experts than the files hold, before its weight table fills the memory."""
    experts = 0 if spec.moe is None else spec.moe.experts * (spec.layers - spec.moe.dense_layers)
    stored = sum(len(file.infos) for file in files)
    if experts > max(stored, _MOST_EXPERTS):
        raise _bad(f"config.json asks for {experts:,} experts, the files hold {stored:,} tensors", _FETCH)


def _check_shapes(model: HfModel) -> None:
    try:
        wanted = {name: p.shape for name, p in build_model(model.spec, "meta").state_dict().items()}
    except RuntimeError as error:
        raise _bad(
            f"config.json of {model.directory} describes a tensor that is too large: {error}",
            "check config.json against the weights",
        ) from None
    for name, entry in model.table.items():
        for theirs, part in to_theirs(entry, torch.empty(wanted[name], device="meta")).items():
            file, stored = model.where[theirs]
            info = file.infos[stored]
            if info.shape != part.shape:
                raise _bad(
                    f"{theirs} has shape {list(info.shape)}, config.json asks for {list(part.shape)}",
                    "check config.json against the weights, or fetch the model again",
                )
            if not info.dtype.is_floating_point:
                raise _bad(f"{theirs} holds {info.dtype}, not floating-point numbers", "import the unquantised model")


def _check_copies(model: HfModel, names: list[str]) -> None:
    """Refuse tied weights that were stored twice with different numbers."""
    for name in names:
        original = family_of(model.spec).stored.copies[name]
        if not torch.equal(model.read_theirs(name), model.read_theirs(original)):
            raise _bad(
                f"{name} differs from {original}, and config.json says that they are one (tie_word_embeddings)",
                "set tie_word_embeddings to false in a copy of config.json, if the model has a head of its own",
            )


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def _bad(cause: str, fix: str) -> ArgosyError:
    return ArgosyError("hf.bad-files", cause, fix=fix)

"""`argosy ckpt export`: write our weights as a directory that `from_pretrained` loads.

The export holds one parameter in memory at a time, needs no GPU, and leaves out padding rows of the vocabulary. Before the directory
gets its final name, every tensor is read back and compared bit for bit, and the logits are compared with those of transformers' own
model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from argosy.checkpoint.assets import copy_assets
from argosy.checkpoint.hf.hf_convert import entries, to_theirs
from argosy.checkpoint.hf.hf_files import INDEX, SINGLE
from argosy.checkpoint.hf.hf_tokenizer import write_tokenizer
from argosy.checkpoint.hf.hf_verify import compare_logits, compare_weights, missing_for_logits, what_fits
from argosy.checkpoint.source import TOKEN_KEYS, Source, open_source
from argosy.checkpoint.staging import require_space, staged
from argosy.checkpoint.tensors import TensorInfo, overflow, write_stream
from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.config.units import parse_bytes
from argosy.console.formats import volume
from argosy.console.progress_bar import ProgressBar
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.families.hf_config import CONFIG, export_gap, to_config
from argosy.families.weight_table import Entry
from argosy.host_memory import available_memory
from argosy.model.build import build_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ExportOptions:
    # None: the dtype of the stored weights.
    dtype: str | None = None
    shard_size: int = 5_000_000_000  # bytes
    verify: bool = True
    keep_padding: bool = False


def shard_bytes(text: str) -> int:
    """Return a shard size such as `5GB` in bytes."""
    try:
        size = int(parse_bytes(text))
        if size < 1:
            raise ValueError("a shard has at least one byte")
    except ValueError as error:
        raise ArgosyError(
            "config.bad-value", str(error), key="--shard-size", value=text, fix="write --shard-size 5GB"
        ) from None
    return size


@dataclass(frozen=True)
class Exported:
    source: str
    step: int
    to: str
    model_type: str
    parameters: int
    bytes: int
    dtype: str
    files: list[str]
    padding_removed: int
    notes: list[str] = field(default_factory=list)

    def describe(self, *, done: bool) -> str:
        lines = [
            f"{'exported' if done else 'would export'} {self.source} (step {self.step}) to {self.to}",
            f"  {self.model_type}: {self.parameters:,} parameters in {self.dtype}, {volume(self.bytes)} in "
            f"{len(self.files)} file{'s' if self.files[1:] else ''}",
        ]
        if self.padding_removed:
            lines.append(f"  {self.padding_removed} rows of padding left out of the vocabulary")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def export_hf(where: str, to: Path, options: ExportOptions, *, dry_run: bool = False) -> Exported:
    notes: list[str] = []
    source = open_source(where, report=notes.append)
    spec = source.model.model_copy(update={"vocab_size": _rows(source, options, notes)})
    config = to_config(spec)
    notes += [
        f"{key} {ours!r} has no place in their config (it matters to training only)"
        for key, (ours, _) in export_gap(spec, config).items()
        if key != "preset"
    ]
    reader = Converter(source, spec, None if options.dtype is None else DTYPES[options.dtype])
    shards = _shards(reader.infos, options.shard_size)
    size = sum(info.nbytes for info in reader.infos.values())
    # The smallest dtype that can represent all tensors.
    dtype = _name(reduce(torch.promote_types, (info.dtype for info in reader.infos.values())))
    facts = Exported(
        where,
        source.step,
        str(to),
        str(config["model_type"]),
        count_parameters(spec).total,
        size,
        dtype,
        list(shards),
        source.model.vocab_size - spec.vocab_size,
        notes,
    )
    require_space(to, size)
    if dry_run:
        return facts
    with staged(to) as stage:
        with ProgressBar("export", size, "B") as bar:
            _write_weights(stage, shards, _counted(reader.theirs, bar))
        ids = source.token_ids
        # The token that ends a document also begins the next one.
        if source.eod_id is not None and "eos_token_id" not in ids:
            ids = {"bos_token_id": source.eod_id, "eos_token_id": source.eod_id} | ids
        _write_json(stage / CONFIG, config | ids | {"dtype": dtype, "torch_dtype": dtype})
        copy_assets(source.root, stage)
        notes += write_tokenizer(source, spec, stage)
        if architecture_of(spec).writes_text and not (stage / "generation_config.json").exists():
            known = {key: value for key, value in (config | ids).items() if key in TOKEN_KEYS}
            _write_json(stage / "generation_config.json", {"_from_model_config": True, **known})
        if options.verify:
            compare_weights(stage, reader.ours)
            notes.append("every tensor was read back and is the same bit for bit")
            notes.append(missing_for_logits(spec) or _compare_logits(stage, reader, 2 * options.shard_size))
        else:
            notes.append("not verified (--no-verify)")
    return facts


class Converter:
    """A reader of our parameters and of the Hugging Face tensors made from them, without padding and in the requested dtype.

    The spec may have fewer layers and tokens than the source.
    """

    def __init__(self, source: Source, spec: ModelSpec, dtype: torch.dtype | None) -> None:
        self.source, self.spec, self.dtype = source, spec, dtype
        self._shapes = {name: tuple(t.shape) for name, t in build_model(spec, "meta").state_dict().items()}
        self._entries: dict[str, Entry] = {}
        self.infos: dict[str, TensorInfo] = {}
        for entry in entries(spec):
            stored = source.infos[entry.ours].dtype
            ours = torch.empty(self._shapes[entry.ours], dtype=dtype or stored, device="meta")
            for name, part in to_theirs(entry, ours).items():
                self._entries[name], self.infos[name] = entry, TensorInfo.of(part)
        self._made: dict[str, Tensor] = {}

    def ours(self, name: str) -> Tensor:
        value = self.source.read(name)
        shape = self._shapes[name]
        value = value[: shape[0]] if shape else value
        return value if self.dtype is None else _rounded(name, value, self.dtype)

    def theirs(self, name: str) -> Tensor:
        """Return a tensor in Hugging Face's layout. Tensors of one parameter are read in a row, so each parameter is converted once."""
        if name not in self._made:
            entry = self._entries[name]
            self._made = to_theirs(entry, self.ours(entry.ours))
        return self._made.pop(name)


def _rounded(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if (beyond := overflow(value, dtype)) is not None:
        raise ArgosyError(
            "hf.unsupported",
            f"{name} {beyond}",
            key="--dtype",
            value=_name(dtype),
            fix="--dtype bf16, which has the range of 32-bit floats"
            if dtype == torch.float16
            else "leave --dtype out, which keeps the dtype of the weights",
        )
    return value.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_logits(stage: Path, reader: Converter, memory: float) -> str:
    """Compare the logits of the exported model, or of a smaller cut of it that fits in `memory` bytes, with ours."""
    spec = reader.spec
    cut = what_fits(spec, min(memory, available_memory()))
    if cut == spec:
        return compare_logits(stage, spec, reader.ours)
    less, place = Converter(reader.source, cut, reader.dtype), stage / "less"
    try:
        place.mkdir()
        _write_weights(place, {SINGLE: less.infos}, less.theirs)
        _write_json(place / CONFIG, to_config(cut))
        found = compare_logits(place, cut, less.ours)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return f"of {cut.layers} of {spec.layers} layers and {cut.vocab_size:,} tokens, which fit in memory, {found}"


def _rows(source: Source, options: ExportOptions, notes: list[str]) -> int:
    """Return the number of vocabulary rows to write."""
    tokenizer = source.tokenizer()
    if tokenizer is None:
        notes.append("the model keeps no tokenizer: none is written, and the vocabulary stays as it is")
    return source.model.vocab_size if options.keep_padding else source.vocabulary(tokenizer)


def _shards(infos: dict[str, TensorInfo], most: int) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each file, in order. A tensor larger than `most` bytes gets a file of its own."""
    parts: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in infos.items():
        if parts[-1] and filled + info.nbytes > most:
            parts.append({})
            filled = 0
        parts[-1][name] = info
        filled += info.nbytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _write_weights(stage: Path, shards: dict[str, dict[str, TensorInfo]], make: Callable[[str], Tensor]) -> None:
    for file, infos in shards.items():
        write_stream(stage / file, infos, make, {"format": "pt"})
    if len(shards) > 1:
        total = sum(info.nbytes for infos in shards.values() for info in infos.values())
        weight_map = {name: file for file, infos in shards.items() for name in infos}
        _write_json(stage / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _counted(make: Callable[[str], Tensor], bar: ProgressBar) -> Callable[[str], Tensor]:
    def one(name: str) -> Tensor:
        tensor = make(name)
        bar.advance(tensor.nbytes)
        return tensor

    return one


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))

"""`argosy ckpt export --adapter`: write the adapters of a LoRA run as a directory that PEFT loads beside the base model.

Our query, key and value projections are one layer with one pair of matrices. PEFT has three layers: each gets A, and its rows of B,
which compute the same, and its rows' magnitudes with DoRA. GPT-2's are one layer there too, whose weight is stored as [in, out]; its A and B
are not. The files are `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from argosy.checkpoint.assets import copy_assets
from argosy.checkpoint.hf.hf_convert import entries, to_theirs
from argosy.checkpoint.hf.hf_export import Exported
from argosy.checkpoint.lora_weights import stored_lora
from argosy.checkpoint.source import Source, open_source
from argosy.checkpoint.staging import require_space, staged
from argosy.checkpoint.stored import StoredTensors
from argosy.checkpoint.tensors import TensorInfo, write_stream
from argosy.config.start import HF, directory_of
from argosy.errors import ArgosyError
from argosy.families.adapter_sizes import MAGNITUDE
from argosy.families.weight_table import Entry, QueryKeyValue, Transposed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(where: str, to: Path, *, dry_run: bool = False) -> Exported:
    """Write the adapters of a run to the directory `to`."""
    notes: list[str] = []
    source = open_source(where, report=notes.append)
    lora = stored_lora(source.root) if source.checkpoint is not None else None
    if lora is None or source.checkpoint is None:
        raise ArgosyError(
            "checkpoint.mismatch",
            f"{where} has no adapters",
            key="--adapter",
            fix="leave --adapter out; it is for runs with model.lora",
        )
    weights = source.checkpoint.weights()
    tensors = dict(_tensors(source, weights))
    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    size = sum(info.nbytes for info in infos.values())
    started = str((source.run or {}).get("init_from") or "")
    base = str(directory_of(started)) if started.startswith(HF) else started or None
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_dora": lora.dora,
        "target_modules": _targets(source, weights),
        "bias": "none",
        "fan_in_fan_out": any(_transposed(entry) for entry in entries(source.model)),
        "inference_mode": True,
    }
    notes.append(f"adapters of {', '.join(config['target_modules'])}; the base model is {base or 'not a directory'}")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    facts = Exported(
        where, source.step, str(to), "DoRA" if lora.dora else "LoRA", parameters, size, "float32", [WEIGHTS], 0, notes
    )
    require_space(to, size)
    if not dry_run:
        with staged(to) as stage:
            write_stream(stage / WEIGHTS, infos, tensors.__getitem__, {"format": "pt"})
            (stage / CONFIG).write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
            copy_assets(source.root, stage)
    return facts


def _tensors(source: Source, weights: StoredTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield PEFT's tensors by name."""
    for entry in entries(source.model):
        layer = entry.ours.removesuffix(".weight")
        if not _adapted(entry, weights):
            continue
        a, b = weights[f"{layer}.lora_a"].float(), weights[f"{layer}.lora_b"].float()
        for name, part in to_theirs(entry, b).items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            yield f"{module}.lora_A.weight", a.contiguous()
            yield f"{module}.lora_B.weight", part.t().contiguous() if _transposed(entry) else part
        if (magnitude := f"{layer}.{MAGNITUDE}") in weights.infos:
            for name, part in to_theirs(entry, weights[magnitude].float()[:, None]).items():
                yield f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector", part.flatten()


def _targets(source: Source, weights: StoredTensors) -> list[str]:
    """Return the ends of the adapted layers' names, as long as they need to be to fit no other layer: PEFT adapts all that fit."""
    layers: dict[bool, set[str]] = {True: set(), False: set()}
    for entry in entries(source.model):
        names = {name.removesuffix(".weight") for name in entry.theirs if name.endswith(".weight")}
        layers[_adapted(entry, weights)] |= names
    last, two = (
        {name: ".".join(name.split(".")[-count:]) for name in set().union(*layers.values())} for count in (1, 2)
    )
    others = {last[name] for name in layers[False]}
    return sorted({two[name] if last[name] in others else last[name] for name in layers[True]})


def _adapted(entry: Entry, weights: StoredTensors) -> bool:
    return f"{entry.ours.removesuffix('.weight')}.lora_a" in weights.infos


def _transposed(entry: Entry) -> bool:
    """True if their weight is stored as [in, out], as that of GPT-2's Conv1D."""
    layout = entry.layout
    return isinstance(layout, Transposed) or (isinstance(layout, QueryKeyValue) and layout.transposed)

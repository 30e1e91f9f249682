"""The source of weights to start from, to sample or to export, read one parameter at a time, by our names.

A source is a run (its newest good checkpoint), one checkpoint, an imported model, or a Hugging Face directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from argosy.checkpoint.assets import tokenizer_files
from argosy.checkpoint.hf.hf_files import HfModel, open_hf
from argosy.checkpoint.lora_weights import merged_weights
from argosy.checkpoint.manifest import WEIGHTS, Checkpoint, verify
from argosy.checkpoint.store import latest, listed, named_checkpoint, require_names
from argosy.checkpoint.tensors import TensorInfo
from argosy.config.model import ModelSpec
from argosy.config.schema import RunSpec
from argosy.config.start import (
    HF,
    MODEL_FILE,
    becomes_towers,
    directory_of,
    model_root,
    starting_model,
    stored_description,
)
from argosy.data.text.tokenizer import LARGEST_TOKENIZER, Tokenizer, load_tokenizer
from argosy.errors import ArgosyError
from argosy.families.adapter_sizes import is_adapter, weight_of_magnitude
from argosy.families.architecture import architecture_of
from argosy.families.hf_config import read_config
from argosy.model.build import initial_value
from argosy.model.ops.low_rank import row_norms
from argosy.tasks.task_registry import TASKS, task_of
from argosy.untrusted import open_regular, read_object, read_regular

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Source:
    # The location as the user wrote it.
    where: str
    model: ModelSpec
    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]
    # The directory with the tokenizer and the other files of the model.
    root: Path
    # None: the source is a Hugging Face directory.
    checkpoint: Checkpoint | None
    # Vocabulary rows without padding, as far as the model's own files say.
    vocab_size: int
    eod_id: int | None
    # Special tokens, by Hugging Face's names.
    token_ids: dict[str, Any]
    # The spec of the run that trained the model. None: no run of ours did.
    run: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.progress.step if self.checkpoint is not None else 0

    def facts(self) -> dict[str, Any]:
        """Return what a run that starts from this source records about it."""
        return {"from": self.where, "step": self.step, "vocab_size": self.vocab_size, "token_ids": self.token_ids}

    def identity(self) -> str:
        """Return a hash that differs between other weights, wherever they lie: of the hashes in a checkpoint's manifest.

        Files of a Hugging Face directory are known by their sizes and by 64 blocks of each, which any training changes.
        """
        digest = hashlib.sha256(f"{self.step}".encode())
        if self.checkpoint is not None:
            weights = {name: file.digest for name, file in self.checkpoint.files.items() if name.startswith(WEIGHTS)}
            digest.update(repr(sorted(weights.items())).encode())
        else:
            for path in sorted(self.root.glob("*.safetensors")):
                _add_blocks(digest, path)
        return digest.hexdigest()

    def run_spec(self) -> RunSpec | None:
        try:
            return None if self.run is None else RunSpec.model_validate(self.run)
        except ValidationError as error:
            cause = f"{self.root} describes no run: {error.errors()[0]['msg']}"
            raise ArgosyError("run.damaged", cause, fix="restore it from a backup") from None

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer stored beside the weights, or None.

        It reads the names of special tokens as those tokens if the model was tuned on conversations, or was trained elsewhere.
        """
        run = self.run_spec()
        return _tokenizer_in(self.root, special_in_text=run is None or task_of(run).special_in_text)

    def vocabulary(self, tokenizer: Tokenizer | None) -> int:
        """Return the number of vocabulary rows without padding."""
        if tokenizer is None:
            return self.model.vocab_size
        return known_rows(self.model, tokenizer, self.vocab_size, self.eod_id)

    def opening(self, tokenizer: Tokenizer) -> list[int]:
        """Return the model's beginning-of-text token if the tokenizer's settings or its own rules prepend it, else nothing."""
        begins = self.token_ids.get("bos_token_id")
        return [begins] if isinstance(begins, int) and opens_with(self.root, begins, tokenizer) else []

    def reads(self, data: Tokenizer | None) -> bool:
        """Return whether ids of the data's tokenizer mean the same text to the model. If a tokenizer is unknown, assume they do."""
        own = self.tokenizer()
        if data is None or own is None or data.fingerprint == own.fingerprint:
            return True
        # One tokenizer may be stored in two forms.
        _, content = data.stored()
        return any(
            read_regular(path, LARGEST_TOKENIZER, within=self.root) == content for path in tokenizer_files(self.root)
        )

    def misread(self) -> str:
        """Return the message for data that fails `reads`."""
        return f"the data was not made with the tokenizer of {self.where}: its ids mean other text there"


def open_source(where: str, report: Callable[[str], None] = lambda text: None) -> Source:
    if where.startswith(HF):
        return hf_source(where, open_hf(directory_of(where)))
    root = model_root(Path(where))
    path = named_checkpoint(Path(where))
    if not path.exists():
        there = [entry.name for entry in listed(root / "checkpoints")]
        raise ArgosyError(
            "run.not-found",
            f"{root} has no checkpoint {path.name}",
            fix=f"it has {', '.join(there)}" if there else "train it first",
        )
    checkpoint = latest(root / "checkpoints", report) if root == path else verify(path)
    if checkpoint is None:
        raise ArgosyError(
            "run.not-found",
            f"{path} has no checkpoint yet",
            fix="train it first, or wait for checkpoint.every to come round",
        )
    weights = merged_weights(checkpoint.weights(), root)
    document = stored_description(root)
    model = starting_model(where)
    imported = (root / MODEL_FILE).exists()
    started = document.get("start") or {}
    special = {} if imported else _special_ids(document["spec"]["data"], _tokenizer_in(root))
    return Source(
        where,
        model,
        weights.infos,
        weights.read,
        root,
        checkpoint,
        vocab_size=document.get("vocab_size", model.vocab_size)
        if imported
        else max(started.get("vocab_size", 0), *(i + 1 for i in special.values()), 0),
        eod_id=document.get("eod_id") if imported else (document.get("data") or {}).get("eod_id"),
        token_ids=dict(document.get("token_ids") or started.get("token_ids") or {}) | _their_roles(model, special),
        run=document.get("spec"),
    )


def known_rows(model: ModelSpec, tokenizer: Tokenizer, inherited: int, eod_id: int | None) -> int:
    """Return the number of vocabulary rows without padding: those of the tokenizer, or of the model that the run started from. The
    end-of-document token may be an id after the tokenizer's own."""
    known = max(inherited, tokenizer.vocab_size, 0 if eod_id is None else eod_id + 1)
    return min(model.vocab_size, known or model.vocab_size)


def inherited_start(root: Path) -> int | None:
    """Return the beginning-of-text token of the model that the run in `root` began from, or None."""
    begins = (_start_of(root).get("token_ids") or {}).get("bos_token_id")
    return begins if isinstance(begins, int) else None


def inherited_vocabulary(root: Path) -> int:
    """Return the number of vocabulary rows, without padding, of the model that the run in `root` began from; 0 without one."""
    return int(_start_of(root).get("vocab_size", 0))


def _start_of(root: Path) -> dict[str, Any]:
    return stored_description(root).get("start") or {}


def opens_with(root: Path, begins: int, tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer's settings in `root`, or else its own rules, put the token `begins` before a text."""
    asked = _tokenizer_settings(root).get("add_bos_token")
    return begins in tokenizer.opening() if asked is None else bool(asked)


def _tokenizer_in(root: Path, *, special_in_text: bool = False) -> Tokenizer | None:
    path = next(iter(tokenizer_files(root)), None)
    return None if path is None else load_tokenizer(str(path), special_in_text=special_in_text, within=root)


def _add_blocks(digest: Any, path: Path, blocks: int = 64, length: int = 4096) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with open_regular(path) as file:
        for number in range(blocks):
            file.seek(max(0, size - length) * number // (blocks - 1))
            digest.update(file.read(length))


def _tokenizer_settings(root: Path) -> dict[str, Any]:
    """Return the settings of transformers' tokenizer class; empty if they cannot be read, since they matter little."""
    try:
        return read_object(root / "tokenizer_config.json", within=root)
    except (OSError, ValueError):
        return {}


def _special_ids(data: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return the ids of the special tokens in encoder samples, by role. The tokenizer may not have them."""
    found: dict[str, int] = {}
    for task in TASKS.values():
        for role in task.roles:
            token = (data.get(task.section or "") or {}).get(role)
            if isinstance(token, str):
                token = None if tokenizer is None else tokenizer.id_of(token)
            if token is not None:
                found[role] = int(token)
    return found


def _their_roles(model: ModelSpec, special: Mapping[str, int]) -> dict[str, int]:
    roles = {"pad": "pad_token_id", "eos": "eos_token_id", "cls": "cls_token_id", "sep": "sep_token_id"}
    found = {name: special[role] for role, name in roles.items() if role in special}
    if architecture_of(model).two_sequences and "pad" in special:
        found["decoder_start_token_id"] = special["pad"]
    return found


def hf_source(where: str, found: HfModel) -> Source:
    config = read_config(found.directory)
    ids = {key: config[key] for key in TOKEN_KEYS if config.get(key) is not None}
    eos = ids.get("eos_token_id")
    return Source(
        where,
        found.spec,
        found.infos,
        found.read,
        found.directory,
        None,
        vocab_size=found.spec.vocab_size,
        eod_id=(eos[0] if eos else None) if isinstance(eos, list) else eos,
        token_ids=ids,
    )


def require_fit(source: Source, model: nn.Module, spec: ModelSpec) -> None:
    """Refuse weights that do not fit the model. The model's vocabulary may be larger than the source's."""
    wanted = {name: (_name_there(source, spec, name), tuple(p.shape)) for name, p in model.named_parameters()}
    need = {there for there, _ in wanted.values() if there is not None}
    left = source.infos.keys() - need if becomes_towers(source.model, spec) else set()
    require_names(source.infos.keys() - left, need, Path(source.where))
    for name, (there, shape) in wanted.items():
        if there is None:
            continue
        found = source.infos[there].shape
        grown = (spec.vocab_size, *found[1:]) if found[:1] == (source.model.vocab_size,) else found
        if shape not in (found, grown):
            raise ArgosyError(
                "checkpoint.mismatch",
                f"{source.where}: {name} has shape {list(found)}, the model wants {list(shape)}",
                fix="leave `model:` out to take it from there",
            )


def starting_weights(source: Source, model: nn.Module, spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a model by name, from a source that fits.

    Parameters that the source lacks are initialised as in a new model: what towers have beyond an encoder, and load-balancing biases of
    experts, which begin at zero, and adapters. Magnitudes (DoRA) are the norms of the source's rows. New vocabulary rows are the mean of the existing rows. Their logits are then the mean of the existing
    logits, so that k new rows beside n add at most log(1 + k / n) to the loss. Random rows would have logits near zero, which in a
    trained model may be far above all others.
    """
    for name, parameter in model.named_parameters():
        there = _name_there(source, spec, name)
        if there is not None:
            value = source.read(there)
        elif (weight := weight_of_magnitude(name)) is not None:
            value = row_norms(source.read(weight))
        else:
            value = initial_value(name, parameter.shape, spec, seed)
        if value.shape != parameter.shape:
            rows = value.float().mean(0).expand(parameter.shape).clone()
            rows[: len(value)] = value
            value = rows
        yield name, value


def _name_there(source: Source, spec: ModelSpec, name: str) -> str | None:
    """Return the name of the source's parameter that initialises a parameter of the model, or None."""
    if not becomes_towers(source.model, spec):
        begins_here = is_adapter(name) or (name.endswith("router.bias") and name not in source.infos)
        return None if begins_here else name
    # The name within one of the towers.
    _, _, inside = name.split(".", 2)
    return None if inside.startswith("projection.") else inside

"""`argosy ckpt import megatron:DIR`: convert a Megatron-LM checkpoint to a model directory (see `model_directory`).

The model spec comes from the run's arguments in `common.pt`, or from the user. The shapes of all tensors are checked against
it before any data is read. Only weights are imported, the optimiser's fp32 master weights if it kept them. One parameter is
in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from argosy.checkpoint.megatron.archive import read_value
from argosy.checkpoint.megatron.masters import with_masters
from argosy.checkpoint.megatron.pickles import PickledObject, UnknownNameError, UnreadableError
from argosy.checkpoint.megatron.torch_dist import METADATA, TorchDist, unsafe
from argosy.checkpoint.megatron.weight_names import EMBEDDING, make_table
from argosy.checkpoint.model_directory import counted, write_model
from argosy.checkpoint.source import Source
from argosy.checkpoint.staging import require_space, staged
from argosy.checkpoint.tensors import require_finite
from argosy.config.counts import count_parameters
from argosy.config.foreign.megatron_stored import model_from_arguments, most_padding
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.config.start import directory_of
from argosy.console.formats import volume
from argosy.console.progress_bar import ProgressBar
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.errors import ArgosyError
from argosy.untrusted import MIB, read_object, read_regular

COMMON, FORMAT, LATEST = "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
# Largest pickle in common.pt, in bytes.
_LARGEST = 2**28
# Modules and names that a run's arguments may contain. Nothing is imported: they stay names.
_MODULES = (
    "argparse.Namespace",
    "megatron.",
    "torch.",
    "collections.",
    "numpy.",
    "signal.",
    "pathlib.",
    "_codecs.",
    "_io.BytesIO",
    "types.SimpleNamespace",
    "copyreg.",
)
_BUILTINS = frozenset(
    f"builtins.{name}" for name in ("set", "frozenset", "dict", "list", "getattr", "bytearray", "slice")
)


@dataclass(frozen=True)
class MegatronImported:
    """The result of an import. `rows` counts the rows of Megatron's embedding; `padding` of them are left out."""

    source: str
    to: str
    family: str
    parameters: int
    bytes: int
    rows: int
    padding: int
    vocabulary_known: bool
    tokenizer: str | None
    masters: bool

    def describe(self, *, done: bool) -> str:
        kept = f"{self.rows:,} rows of the vocabulary"
        if self.padding:
            kept += f", of which {self.padding:,} are padding and left out"
        elif not self.vocabulary_known:
            kept += ", all kept: if some are padding, give --tokenizer or vocab_size=N"
        lines = [
            f"{'imported' if done else 'would import'} {self.source} to {self.to}",
            f"  {self.family}: {self.parameters:,} parameters, {volume(self.bytes)} of weights, "
            + ("the optimiser's in 32 bits" if self.masters else "as the model kept them"),
            "  the optimiser's moments are left behind",
            f"  {kept}",
            f"  tokenizer: {self.tokenizer or 'none; --tokenizer PATH puts one beside the weights'}",
        ]
        return "\n".join([*lines, f"start a run from it with init_from: {self.to}"] if done else lines)


def import_megatron(
    source: str,
    to: Path,
    *,
    model: str | None = None,
    changes: Sequence[str] = (),
    tokenizer: str | None = None,
    masters: bool = True,
    dry_run: bool = False,
) -> MegatronImported:
    """Import a Megatron-LM checkpoint to the model directory `to`.

    Args:
        model: a preset, instead of the arguments in the checkpoint.
        changes: `key=value` overrides of the model spec.
        masters: import the optimiser's fp32 master weights if all of them are stored.
    """
    directory = find_iteration(directory_of(source))
    stored = TorchDist(directory)
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    spec, known = _model(directory, model, changes, loaded)
    table = make_table(spec, stored.infos, str(directory))
    better = with_masters(table, stored.infos) if masters else None
    rows = next(piece for piece in table["embed.tokens.weight"].pieces if piece.name.endswith(EMBEDDING))
    total = stored.infos[rows.name].shape[0]
    table = better or table
    infos = {name: part.info for name, part in table.items()}
    size = sum(info.nbytes for info in infos.values())
    name = None if loaded is None else loaded.stored()[0]
    found = MegatronImported(
        source,
        str(to),
        spec.family,
        count_parameters(spec).total,
        size,
        total,
        total - spec.vocab_size,
        known,
        name,
        better is not None,
    )
    require_space(to, size)
    if dry_run:
        return found

    def read(one: str) -> Tensor:
        return require_finite(one, table[one].read(stored), "megatron.bad-files")

    like = Source(source, spec, infos, read, directory, None, spec.vocab_size, _eod(loaded), {})
    with staged(to) as stage:
        with ProgressBar("import", size, "B") as bar:
            write_model(stage, like, source, infos, counted(like.read, bar))
        if loaded is not None:
            file, content = loaded.stored()
            (stage / file).write_bytes(content)
    return found


def find_iteration(directory: Path) -> Path:
    """Return the directory with `.metadata`: the given one, NeMo's `weights/` in it, or the newest iteration of a run."""
    for place in (directory, directory / "weights"):
        if (place / METADATA).exists():
            _require_format(place)
            return place
    if (directory / LATEST).is_file():
        text = read_regular(directory / LATEST, MIB, within=directory).decode(errors="replace")[:64].strip()
        name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
        if name == "release" or name.startswith("iter_"):
            return find_iteration(directory / name)
    _require_format(directory)
    if any(directory.glob("mp_rank_*")):
        raise _unsupported(directory, "it is in the older format `torch` (mp_rank_…), which is all pickle")
    raise ArgosyError(
        "megatron.bad-files",
        f"{directory} has neither {METADATA} nor {LATEST}",
        fix="give the directory of --save, or one iter_… in it",
    )


def _require_format(directory: Path) -> None:
    path = directory / FORMAT
    if not os.path.lexists(path):
        return
    try:
        kind = read_object(path, within=directory)["sharded_backend"]
    except (OSError, ValueError, KeyError) as error:
        raise ArgosyError("megatron.bad-files", f"{path} cannot be read: {error}", fix="copy it again") from None
    if kind != "torch_dist":
        raise _unsupported(directory, f"its format is {kind!r}")


def _unsupported(directory: Path, why: str) -> ArgosyError:
    return ArgosyError(
        "megatron.unsupported",
        f"{directory} cannot be imported: {why}",
        fix="load it in Megatron-LM and save it with --ckpt-format torch_dist",
    )


def _model(
    directory: Path, model: str | None, changes: Sequence[str], loaded: Tokenizer | None
) -> tuple[ModelSpec, bool]:
    """Return the model spec, and whether its vocabulary size without padding is known."""
    known = model is not None or any(change.startswith("vocab_size=") for change in changes)
    if model is not None:
        return resolve_model(model, changes), known
    arguments = _arguments(directory)
    tree = model_from_arguments(arguments, str(directory))
    if not known and loaded is not None:
        _require_padding(loaded.vocab_size, tree["vocab_size"], most_padding(arguments, str(directory)))
        tree["vocab_size"], known = loaded.vocab_size, True
    return resolve_model({key: value for key, value in tree.items() if value is not None}, changes), known


def _require_padding(tokens: int, rows: int, most: int) -> None:
    """Refuse a tokenizer that is not the model's: more rows would be dropped than padding can add."""
    if rows - tokens >= most:
        raise ArgosyError(
            "tokenizer.mismatch",
            f"the tokenizer has {tokens:,} tokens and the model {rows:,} rows; padding to a multiple of {most:,} would have made "
            f"{-(-tokens // most) * most:,} of them",
            key="--tokenizer",
            fix="give the tokenizer the model was trained with; or vocab_size=N for the rows to keep",
        )


def _arguments(directory: Path) -> dict[str, Any]:
    """Return the run's arguments. Values that are not plain stay `PickledObject`s."""
    path = directory / COMMON
    describe = "describe the model with --model PRESET and KEY=VALUE, and it is not opened"
    try:
        if path.is_symlink():
            raise UnreadableError("it is a link")
        document = read_value(path, _known, _LARGEST)
    except UnknownNameError as error:
        raise unsafe(path, str(error), f"ask where it came from; if you know why it is there, {describe}") from None
    except FileNotFoundError:
        document = {}
    except (UnreadableError, OSError) as error:
        raise ArgosyError("megatron.bad-files", f"{path} cannot be read: {error}", fix=describe) from None
    arguments = document.get("args") if isinstance(document, dict) else None
    if not isinstance(arguments, PickledObject) or not isinstance(arguments.state, dict):
        raise ArgosyError(
            "megatron.bad-files",
            f"{path} does not hold the arguments of the run, so that the model is not known",
            fix=describe,
        )
    return {key: value for key, value in arguments.state.items() if isinstance(key, str)}


def _known(dotted: str) -> bool:
    return dotted in _BUILTINS or dotted.startswith(_MODULES)


def _eod(loaded: Tokenizer | None) -> int | None:
    try:
        return None if loaded is None else loaded.eod_id
    except ArgosyError:
        return None

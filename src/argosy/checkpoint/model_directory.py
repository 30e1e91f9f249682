"""A model that is no run, as `import` and `average` make it:

DIR/
  model.json                     the model spec, where it came from, its token ids, and the spec of the run that trained it, if any
  tokenizer.json …               the tokenizer's files and generation settings, as they were
  checkpoints/step-00000000/     the weights, without optimiser; hashed as every checkpoint is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
from torch import Tensor

from argosy.checkpoint.manifest import WEIGHTS, TrainProgress, finish
from argosy.checkpoint.source import Source
from argosy.checkpoint.stored import file_of
from argosy.checkpoint.tensors import TensorInfo, write_stream
from argosy.config.start import MODEL_FILE
from argosy.console.progress_bar import ProgressBar


def write_model(
    directory: Path, like: Source, source: str, infos: Mapping[str, TensorInfo], make: Callable[[str], Tensor]
) -> None:
    """With weights that are made one at a time, of the model that `like` describes."""
    place, file = directory / "checkpoints" / "step-00000000", file_of(WEIGHTS, 0, 1)
    place.mkdir(parents=True)
    finish(place, TrainProgress(0, 0), {file: write_stream(place / file, infos, make)})
    description = {
        "format": "argosy-model",
        "version": 1,
        "source": source,
        "model": like.model.model_dump(mode="json"),
        "vocab_size": like.vocab_size,
        "eod_id": like.eod_id,
        "token_ids": like.token_ids,
        "spec": like.run,
    }
    (directory / MODEL_FILE).write_bytes(orjson.dumps(description, option=orjson.OPT_INDENT_2))


def counted(read: Callable[[str], Tensor], bar: ProgressBar) -> Callable[[str], Tensor]:
    """The same, with each tensor's bytes shown on a bar."""

    def one(name: str) -> Tensor:
        tensor = read(name)
        bar.advance(tensor.nbytes)
        return tensor

    return one

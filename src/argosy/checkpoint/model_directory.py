"""The directory of a model that is no run, as `ckpt import` and `ckpt average` write it:

DIR/
  model.json                     model spec, source, token ids, and the spec of the run that trained it, if any
  tokenizer.json …               tokenizer files and generation config, unchanged
  checkpoints/step-00000000/     weights without optimiser state, hashed like every checkpoint
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
    """Write a model directory. `make` returns one weight at a time; `like` describes the model."""
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
    """Return a `read` that also advances the progress bar by each tensor's bytes."""

    def one(name: str) -> Tensor:
        tensor = read(name)
        bar.advance(tensor.nbytes)
        return tensor

    return one

"""Whether an exported model is ours: every tensor bit for bit, and the logits of transformers' own model.

Tensors are compared one at a time. Logits need two models in memory; where that is too much, the models are cut to as
many of the first layers as fit, which still goes through the embedding, the layers' code, the head and every setting of
the config, while all weights have been compared before.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.checkpoint.hf_files import open_hf
from argosy.config.counts import count_parameters
from argosy.config.hf import to_config
from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.model.build import build_model

TOLERANCE = 1e-4  # of the largest logit; two programs in 32-bit floats differ by 1e-6
_OVERHEAD = 1.3  # of both models' weights: activations and what loading takes


def compare_weights(directory: Path, ours: Callable[[str], Tensor]) -> None:
    """Read what was written as an import would, and hold it against our parameters."""
    written = open_hf(directory)
    for name in written.table:
        if not torch.equal(written.read(name), ours(name)):
            raise _differs(f"{name} was read back with other numbers", "check the disk, and export again")


def compare_logits(directory: Path, spec: ModelSpec, ours: Callable[[str], Tensor]) -> str:
    """On random tokens, in 32-bit floats, with the weights as exported. Returns what was found, in words."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: the logits were not compared with its model (pip install transformers)"
    layers = layers_that_fit(spec, _available_memory())
    if layers == 0:
        need = _need(_cut(spec, 1)) / 1e9
        return f"the logits were not compared: one layer twice takes {need:.1f} GB of memory, and less is free"
    cut = _cut(spec, layers)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (2, min(32, spec.max_seq_len)), generator=generator)
    with torch.no_grad():
        expected = _their_logits(directory, cut, tokens)
        found = _our_logits(cut, tokens, ours)
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    what = "" if layers == spec.layers else f" of the first {layers} of {spec.layers} layers, all that memory holds,"
    if not difference <= TOLERANCE * largest:
        raise _differs(
            f"the logits{what} differ by {difference:.3g} where the largest is {largest:.3g}",
            "report this with config.json: the conversion is wrong",
        )
    return (
        f"the logits{what} equal those of transformers: they differ by {difference:.1e}, the largest is {largest:.3g}"
    )


def layers_that_fit(spec: ModelSpec, memory: float) -> int:
    """Of two models side by side: all, or as many of the first ones as fit in `memory` bytes."""
    return next((n for n in range(spec.layers, 0, -1) if _need(_cut(spec, n)) <= memory), 0)


def _need(spec: ModelSpec) -> float:
    return 2 * 4 * count_parameters(spec).total * _OVERHEAD


def _cut(spec: ModelSpec, layers: int) -> ModelSpec:
    decoder = None if spec.decoder_layers is None else max(1, spec.decoder_layers * layers // spec.layers)
    return spec.model_copy(update={"layers": layers, "decoder_layers": decoder})


def _our_logits(spec: ModelSpec, tokens: Tensor, ours: Callable[[str], Tensor]) -> Tensor:
    model = build_model(spec).eval()
    for name, slot in model.state_dict().items():
        slot.copy_(ours(name))
    found: Tensor = model(tokens, **_decoder_side(spec, tokens, "decoder_tokens"))
    return found


def _their_logits(directory: Path, spec: ModelSpec, tokens: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # layers left out are on purpose
    document = json.loads((directory / "config.json").read_text()) | to_config(spec)
    kind: Any = getattr(transformers, document["architectures"][0])
    config = kind.config_class.from_dict(document)
    model = kind.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    output = model(input_ids=tokens, **_decoder_side(spec, tokens, "decoder_input_ids"))
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits


def _decoder_side(spec: ModelSpec, tokens: Tensor, name: str) -> dict[str, Tensor]:
    return {name: tokens.flip(1)} if spec.architecture == "encoder-decoder" else {}


def _available_memory() -> float:
    """Bytes that can be taken without swapping; without limit where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):
        return float("inf")


def _differs(cause: str, fix: str) -> ArgosyError:
    return ArgosyError("hf.differs", cause + "; nothing was kept", fix=fix)

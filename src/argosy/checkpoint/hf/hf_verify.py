"""Verification of an exported model: every tensor bit for bit, and the logits against transformers' own model.

Tensors are compared one at a time. Logits need a whole model in memory, first theirs, then ours. If that exceeds the memory limit of
the export, a cut of the model is written by the same code and compared: the first rows of the vocabulary and as many of the first
layers as fit. The cut still covers the embedding, the layers' code, the head and every setting of the config, and all weights have
been compared before.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.checkpoint.hf.hf_files import open_hf
from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.families.family_registry import plan_of
from argosy.families.hf_config import read_config
from argosy.host_memory import available_memory
from argosy.model.build import build_model

# Relative to the largest logit. Two implementations in 32-bit floats differ by 1e-6.
TOLERANCE = 1e-4
# Memory relative to a model's weights: the file is in memory as well during loading.
_OVERHEAD = 2
# Vocabulary rows of a cut model.
_ROWS = 1024


def compare_weights(directory: Path, ours: Callable[[str], Tensor]) -> None:
    """Read the written files as an import would, and compare them with our parameters."""
    written = open_hf(directory)
    for name in written.table:
        value = ours(name)
        # With NaN no logits would be equal, and neither disk nor conversion is to blame.
        if not value.isfinite().all():
            raise _differs(f"{name} holds NaN or an infinity", "export a checkpoint from before it did")
        if not torch.equal(written.read(name), value):
            raise _differs(f"{name} was read back with other numbers", "check the disk, and export again")


def compare_logits(directory: Path, spec: ModelSpec, ours: Callable[[str], Tensor]) -> str:
    """Compare logits on random tokens, in 32-bit floats, with the exported weights. Return the result in words."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (2, min(32, spec.max_seq_len)), generator=generator)
    with torch.no_grad():
        expected = _their_logits(directory, spec, tokens)
        found = _our_logits(spec, tokens, ours)
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= TOLERANCE * largest:
        raise _differs(
            f"the logits differ by {difference:.3g} where the largest is {largest:.3g}",
            "report this with config.json: the conversion is wrong",
        )
    return f"the logits equal those of transformers: they differ by {difference:.1e}, the largest is {largest:.3g}"


def missing_for_logits(spec: ModelSpec) -> str | None:
    """Return why logits cannot be compared on this machine, or None if they can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: the logits were not compared with its model (pip install transformers)"
    if (need := _need(_cut(spec, _least(spec)))) > available_memory():
        return f"the logits were not compared: one layer takes {need / 1e9:.1f} GB of memory, and less is free"
    return None


def what_fits(spec: ModelSpec, allowed: float) -> ModelSpec:
    """Return the model, or the largest cut of it that fits in `allowed` bytes; a cut has at least one layer of each kind."""
    if _need(spec) <= allowed:
        return spec
    sizes = [_cut(spec, layers) for layers in range(spec.layers, _least(spec) - 1, -1)]
    return next((cut for cut in sizes if _need(cut) <= allowed), sizes[-1])


def _least(spec: ModelSpec) -> int:
    """Return the smallest number of first layers that includes one layer of each kind."""
    plan = plan_of(spec)
    kinds = 1 + max(plan.index(layer) for layer in set(plan))
    return kinds if spec.moe is None else max(kinds, spec.moe.dense_layers + 1)


def _need(spec: ModelSpec) -> float:
    return 4 * count_parameters(spec).total * _OVERHEAD


def _cut(spec: ModelSpec, layers: int) -> ModelSpec:
    decoder = None if spec.decoder_layers is None else max(1, spec.decoder_layers * layers // spec.layers)
    rows = min(_ROWS, spec.vocab_size)
    return spec.model_copy(update={"layers": layers, "decoder_layers": decoder, "vocab_size": rows})


def _our_logits(spec: ModelSpec, tokens: Tensor, ours: Callable[[str], Tensor]) -> Tensor:
    model = build_model(spec).eval()
    for name, slot in model.state_dict().items():
        slot.copy_(ours(name))
    found: Tensor = model(tokens, **_decoder_side(spec, tokens, "decoder_tokens"))
    return found


def _their_logits(directory: Path, spec: ModelSpec, tokens: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kind: Any = getattr(transformers, read_config(directory)["architectures"][0])
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    if spec.moe is not None and hasattr(model, "set_experts_implementation"):
        # The faster implementations do not support every expert width.
        model.set_experts_implementation("eager")
    output = model(input_ids=tokens, **_decoder_side(spec, tokens, "decoder_input_ids"))
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits


def _decoder_side(spec: ModelSpec, tokens: Tensor, name: str) -> dict[str, Tensor]:
    return {name: tokens.flip(1)} if architecture_of(spec).two_sequences else {}


def _differs(cause: str, fix: str) -> ArgosyError:
    return ArgosyError("hf.differs", cause + "; nothing was kept", fix=fix)

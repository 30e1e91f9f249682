"""What a run's layers ask of the attention back ends, described before there is a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from argosy.config.schema import RunSpec
from argosy.families.architecture import architecture_of
from argosy.families.family_registry import plan_of
from argosy.model.attention import Case, Mask, choose_backend
from argosy.model.sharding import WHOLE, Share
from argosy.parallel.precision import DTYPES
from argosy.tasks.task_registry import task_of


class AttentionCase(NamedTuple):
    """A kind of layer and what it asks of a back end."""

    layers: str
    case: Case


def attention_cases(spec: RunSpec, precision: str, device: torch.device) -> Iterator[AttentionCase]:
    """Yield what each kind of layer asks of a back end in training."""
    model, architecture = spec.model, architecture_of(spec.model)
    some, given = torch.empty(0), task_of(spec).mask_inputs
    parted = spec.data.document_mask or "documents" in given
    mask = Mask(
        causal=architecture.causal,
        slopes=some if model.positions == "alibi" else None,
        # In an encoder, padding is a document of its own.
        documents=some if parted or not (architecture.causal or architecture.two_sequences) else None,
        reach=some if "reach" in given else None,
        bias=some if model.positions == "relative" else None,
    )
    cut = spec.parallel.cp > 1 and spec.parallel.cp_kind == "allgather"
    queries = Share((0,), 2 * spec.parallel.cp) if cut else WHOLE
    for window in dict.fromkeys(layer.attention.window for layer in plan_of(model)):
        seen = Mask(mask.causal, window, mask.slopes, mask.documents, mask.reach, mask.bias).within(spec.data.seq_len)
        layers = "over the whole sequence" if seen.window is None else f"in a window of {window:,}"
        yield AttentionCase(
            layers,
            Case(
                seen, device, DTYPES[precision], model.head_dim, spec.data.seq_len, model.dropout,
                queries=queries,
            ),
        )  # fmt: skip


def attention_backends(spec: RunSpec, precision: str, device: torch.device) -> set[str]:
    """Return the names of the back ends that compute attention in training."""
    return {choose_backend(case).name for _, case in attention_cases(spec, precision, device)}

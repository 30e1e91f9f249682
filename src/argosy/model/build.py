"""From a model spec to the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from argosy.config.model import ModelSpec
from argosy.families.architecture import DECODER, ENCODER, ENCODER_DECODER, RETRIEVER, Architecture, architecture_of
from argosy.model.decoder import Decoder
from argosy.model.encoder import MaskedLM
from argosy.model.encoder_decoder import EncoderDecoder
from argosy.model.retriever import Retriever

_MODELS: dict[Architecture, Callable[[ModelSpec], nn.Module]] = {
    DECODER: Decoder,
    ENCODER: MaskedLM,
    RETRIEVER: Retriever,
    ENCODER_DECODER: EncoderDecoder,
}


def build_model(spec: ModelSpec, device: torch.device | str = "cpu") -> nn.Module:
    """The model with uninitialised weights; `argosy.model.init` or a checkpoint fills them."""
    with torch.device(device):
        return _MODELS[architecture_of(spec)](spec)

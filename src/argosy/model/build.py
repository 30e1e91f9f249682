"""From a model spec to the model."""

from __future__ import annotations

import torch
from torch import nn

from argosy.config.model import ModelSpec
from argosy.model.decoder import Decoder
from argosy.model.encoder import MaskedLM
from argosy.model.encoder_decoder import EncoderDecoder
from argosy.model.retriever import Retriever


def build_model(spec: ModelSpec, device: torch.device | str = "cpu") -> nn.Module:
    """The model with uninitialised weights; `argosy.model.init` or a checkpoint fills them."""
    with torch.device(device):
        if spec.architecture == "decoder":
            return Decoder(spec)
        if spec.architecture == "encoder":
            return MaskedLM(spec) if spec.retrieval is None else Retriever(spec, spec.retrieval)
        return EncoderDecoder(spec)

"""From a model spec to the model."""

from __future__ import annotations

import torch
from torch import nn

from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.model.decoder import Decoder
from argosy.model.encoder import MaskedLM
from argosy.model.encoder_decoder import EncoderDecoder


def build_model(spec: ModelSpec, device: torch.device | str = "cpu") -> nn.Module:
    """The model with uninitialised weights; `argosy.model.init` or a checkpoint fills them."""
    if spec.moe is not None:
        raise ArgosyError(
            "model.unsupported",
            "mixture-of-experts models are described and counted, but this version trains dense models only",
            key="model",
            value=spec.preset or spec.family,
            fix="choose a dense model; `argosy config models` marks those that can be trained",
        )
    with torch.device(device):
        if spec.architecture == "decoder":
            return Decoder(spec)
        if spec.architecture == "encoder":
            return MaskedLM(spec)
        return EncoderDecoder(spec)

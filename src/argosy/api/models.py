"""Trained models from Python: as plain PyTorch modules, and the text they write."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from argosy.checkpoint.source import open_source
from argosy.data.text.tokenizer import Tokenizer
from argosy.infer.generate import sample, source_tokenizer
from argosy.infer.loading import load_model as load
from argosy.model.decoding import Sampling


def load_model(where: str | Path, *, device: str | None = None) -> nn.Module:
    """Load trained weights into a plain PyTorch module, in evaluation mode.

    Calling the module with token ids ([batch, seq], int64) returns logits ([batch, seq, vocabulary]); its parameters can
    be trained further with any optimizer. BERT and T5 models take further inputs.

    Args:
        where: a run directory (its newest good checkpoint), one checkpoint of it, an imported model, or "hf:DIRECTORY".
        device: "cpu", "cuda", ...; default: the device the run's spec would train on.
    """
    return load(str(where), device=device).model


def load_tokenizer(where: str | Path) -> Tokenizer:
    """Load the tokenizer that a run or a model reads text with: `encode(texts)`, `decode(ids)`."""
    return source_tokenizer(open_source(str(where)))


def generate_text(
    where: str | Path,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    device: str | None = None,
) -> str:
    """Continue a prompt with a trained model, as `argosy sample` does. Returns the prompt and its continuation.

    Args:
        tokens: most tokens to write; an end-of-document token ends the text earlier.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among this many tokens; 0 among all.
    """
    return sample(str(where), prompt, Sampling(tokens, temperature, top_k, seed), device)

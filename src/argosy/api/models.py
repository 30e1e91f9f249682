"""Trained models from Python: as plain PyTorch modules, and the text they write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from argosy.checkpoint.source import open_source
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.infer.generate import source_tokenizer, write_texts
from argosy.infer.loading import load_model as load
from argosy.model.decoding import Sampling

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_model(where: str | Path, *, device: str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Load trained weights into a plain PyTorch module, in evaluation mode.

    Calling the module with token ids ([batch, seq], int64) returns logits ([batch, seq, vocabulary]); its parameters can
    be trained further with any optimizer. BERT and T5 models take further inputs.

    Args:
        where: a run directory (its newest good checkpoint), one checkpoint of it, an imported model, or "hf:DIRECTORY".
        device: "cpu" or "cuda"; default: the device the run's spec would train on.
        dtype: torch.float32, bfloat16 or float16. Default: the type the run computed in (bf16 for fp8), and float32 on a
            CPU without instructions for it. float32 gives the master weights of a checkpoint, unrounded.
    """
    return load(str(where), device=device, precision=_precision(dtype)).model


def load_tokenizer(where: str | Path) -> Tokenizer:
    """Load the tokenizer that a run or a model reads text with: `encode(text)`, `decode(ids)`."""
    return source_tokenizer(open_source(str(where)))


class TextGenerator:
    """A trained model and its tokenizer, loaded once to write many texts: `generate(prompt)`.

    `model` is the module that `load_model` returns (on a CPU with matrices stored column by column), `tokenizer` the one of
    `load_tokenizer`. The arguments are those of `load_model`.
    """

    def __init__(self, where: str | Path, *, device: str | None = None, dtype: torch.dtype | None = None) -> None:
        self._loaded = load(str(where), device=device, precision=_precision(dtype), writes=True)
        self.model: nn.Module = self._loaded.model
        self.tokenizer: Tokenizer = source_tokenizer(self._loaded.source)

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
        top_p: float = 1.0,
    ) -> str:
        """Continue a prompt, as `argosy sample` does. Returns the prompt and its continuation.

        Args:
            tokens: most tokens to write; an end-of-document token ends the text earlier.
            temperature: 0 takes the likeliest token each time.
            top_k: sample among this many tokens; 0 among all.
            seed: the same seed gives the same text.
            top_p: sample among the likeliest tokens whose probabilities add up to this.
        """
        [text] = self.generate_batch(
            [prompt], tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, top_p=top_p
        )
        return text

    def generate_batch(
        self,
        prompts: Sequence[str],
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
        top_p: float = 1.0,
    ) -> list[str]:
        """Continue several prompts as one batch. The arguments are those of `generate`, which writes the same texts."""
        options = Sampling(tokens, temperature, top_k, seed, top_p)
        return write_texts(self._loaded, self.tokenizer, prompts, options)


def generate_text(
    where: str | Path,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    top_p: float = 1.0,
    device: str | None = None,
) -> str:
    """Load a trained model and continue one prompt. The arguments are those of `TextGenerator` and its `generate`."""
    generator = TextGenerator(where, device=device)
    return generator.generate(prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, top_p=top_p)


def _precision(dtype: torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    if dtype not in _PRECISIONS:
        raise ArgosyError(
            "config.bad-value",
            f"a model is loaded as float32, bfloat16 or float16, not as {dtype}",
            key="dtype",
            value=str(dtype),
            fix="dtype=torch.float32, or cast the loaded model",
        )
    return _PRECISIONS[dtype]

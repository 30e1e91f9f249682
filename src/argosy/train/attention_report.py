"""The line at the start of a run that says which kernels compute attention and what would make them faster.

The cases of a run are described as its model will ask for them, and put to the same back ends. If neither Argosy's own kernels nor
flash-attn-4 accept a case, the case is changed one key at a time, and the first change they would accept is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from argosy.config.schema import RunSpec
from argosy.extras import install_extra
from argosy.model.attention import BACKENDS, Case, choose_backend
from argosy.model.ops import flash
from argosy.model.sharding import WHOLE
from argosy.parallel.attention_cases import attention_cases

# The back ends that are faster than the others, with the names people know.
_FAST = {"hopper": "Argosy's own kernels", "flash": "flash-attn-4"}
_OTHERS = {"flex": "FlexAttention", "explicit": "torch, with the mask as a tensor of its own"}
_TOKENS = 128


def attention_lines(spec: RunSpec, precision: str, device: torch.device) -> list[str]:
    """Return who computes attention on a GPU, a line for each back end."""
    said: dict[str, list[str]] = {}
    for layers, case in attention_cases(spec, precision, device):
        said.setdefault(_described(case, deterministic=spec.train.deterministic), []).append(layers)
    if len(said) == 1:
        return [f"attention by {text}" for text in said]
    return [f"attention {' and '.join(layers)} by {text}" for text, layers in said.items()]


def _described(case: Case, *, deterministic: bool) -> str:
    chosen = choose_backend(case).name
    if chosen in _FAST:
        return _FAST[chosen]
    by_cudnn = chosen == "sdpa" and case.dtype != torch.float32
    text = _OTHERS.get(chosen, "cuDNN" if by_cudnn and not deterministic else "torch")
    if faster := next(_faster(case), None):
        return f"{text}; {faster}"
    if by_cudnn and deterministic:
        return f"{text}; train.deterministic=false leaves it to cuDNN, which is faster and not repeatable"
    return text


def _faster(case: Case) -> Iterator[str]:
    """Yield what would let a faster back end compute a case, the smallest change first."""
    even = -(-case.seq // _TOKENS) * _TOKENS
    changes = {
        "": case,
        "train.precision=bf16": case._replace(dtype=torch.bfloat16),
        "model.dropout=0": case._replace(dropout=0.0),
        f"data.seq_len={even}": case._replace(seq=even),
        "parallel.cp_kind=ulysses": case._replace(queries=WHOLE),
    }
    fast = [backend for backend in BACKENDS if backend.name in _FAST]
    for change, other in changes.items():
        for backend in fast:
            refused = backend.refuses(other)
            if refused is None:
                yield f"{change} would leave it to {_FAST[backend.name]}, and be faster"
            elif refused == flash.NOT_INSTALLED:
                with_change = f" with {change}" if change else ""
                yield f"flash-attn-4 would be faster{with_change}: {install_extra('flash')}"

"""The line at the start of a run that says which kernels compute attention and what would make them faster.

The cases of a run are described as its model will ask for them, and put to the same back ends. If neither Argosy's own kernels nor
flash-attn-4 accept a case, keys are changed, one, then two and more, until one of them accepts it. Only if no change of keys is enough,
the line says to install flash-attn-4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

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
        said.setdefault(_described(case, spec), []).append(layers)
    if len(said) == 1:
        return [f"attention by {text}" for text in said]
    return [f"attention {' and '.join(layers)} by {text}" for text, layers in said.items()]


def _described(case: Case, spec: RunSpec) -> str:
    chosen, deterministic = choose_backend(case).name, spec.train.deterministic
    if chosen in _FAST:
        return _FAST[chosen]
    by_cudnn = chosen == "sdpa" and case.dtype != torch.float32
    text = _OTHERS.get(chosen, "cuDNN" if by_cudnn and not deterministic else "torch")
    if faster := _faster(case, spec.model.max_seq_len):
        return f"{text}; {faster}"
    if by_cudnn and deterministic:
        return f"{text}; train.deterministic=false leaves it to cuDNN, which is faster and not repeatable"
    return text


def _faster(case: Case, longest: int) -> str | None:
    """Return the fewest changes that let a faster back end compute a case. `longest` is the model's longest sequence."""
    fast = [backend for backend in BACKENDS if backend.name in _FAST]
    changed = list(_changed_cases(case, longest))
    for keys, other in changed:
        for backend in fast:
            if backend.refuses(other) is None:
                return f"{keys} would leave it to {_FAST[backend.name]}, and be faster"
    for keys, other in changed:
        if any(backend.refuses(other) == flash.NOT_INSTALLED for backend in fast):
            return f"flash-attn-4 would be faster{f' with {keys}' if keys else ''}: {install_extra('flash')}"
    return None


def _changed_cases(case: Case, longest: int) -> Iterator[tuple[str, Case]]:
    """Yield changes of keys and the case they make: none, each alone, then each two and more together."""
    # The next multiple, or the one below where the model has no longer sequence.
    even = next((n for n in (-(-case.seq // _TOKENS) * _TOKENS, case.seq // _TOKENS * _TOKENS) if n <= longest), 0)
    changes: dict[str, dict[str, Any]] = {
        "train.precision=bf16": {"dtype": torch.bfloat16},
        "model.dropout=0": {"dropout": 0.0},
        f"data.seq_len={even or case.seq}": {"seq": even or case.seq},
        "parallel.cp_kind=ulysses": {"queries": WHOLE},
    }
    useful = [key for key, fields in changes.items() if case._replace(**fields) != case]
    for count in range(len(useful) + 1):
        for keys in combinations(useful, count):
            other = case
            for key in keys:
                other = other._replace(**changes[key])
            yield " and ".join(keys), other

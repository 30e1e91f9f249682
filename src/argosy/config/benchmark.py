"""The run spec of `argosy bench`: a preset, synthetic data, and the keys that change what a step computes.

Every other key would have no effect on the measurement, so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy.config.refusals import is_key
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.tasks.task_registry import SECTIONS

# Tokens in a step unless --batch is given.
TOKENS = 16_384
_USED = (
    *("model", "optim", "parallel", "data.seq_len", "data.task"),
    *(f"data.{section}" for section in SECTIONS),
    *("train.precision", "train.z_loss", "train.seed", "train.device", "train.deterministic"),
)
_OPTIONS = {
    "model.preset": "MODEL",
    "train.global_batch": "--batch",
    "parallel.micro_batch": "--micro-batch",
    "train.steps": "--steps",
}


def benchmark_spec(
    model: str,
    overrides: Sequence[str],
    *,
    steps: int,
    batch: int | None = None,
    micro_batch: int | None = None,
    seq_len: int | None = None,
) -> RunSpec:
    _require_use(overrides, seq_len=seq_len is not None)
    keys = [f"model.preset={model}", "data.train=made-up", f"train.steps={steps}", "optim.lr=1e-4", "eval=off"]
    keys += ["train.deterministic=false", *([] if seq_len is None else [f"data.seq_len={seq_len}"]), *overrides]
    samples = batch or _samples(keys)
    return resolve(
        None, [f"train.global_batch={samples}", f"parallel.micro_batch={micro_batch or samples}", *keys]
    ).spec


def _samples(keys: Sequence[str]) -> int:
    """Return the batch size that makes a step of TOKENS tokens, given the sequence length these keys resolve to."""
    any_size = ["train.global_batch=16", "parallel.micro_batch=16"]
    return max(1, TOKENS // resolve(None, [*keys, *any_size]).spec.data.seq_len)


def _require_use(overrides: Sequence[str], *, seq_len: bool) -> None:
    options = _OPTIONS | ({"data.seq_len": "--seq-len"} if seq_len else {})
    for override in overrides:
        key, _, value = override.partition("=")
        if option := options.get(key):
            raise ArgosyError(
                "config.conflict",
                f"argosy bench has its own argument for this key: {option}",
                key=key,
                value=value,
                fix=f"{option} {value}" if option.startswith("-") else f"argosy bench {value}",
            )
        if is_key(key) and not f"{key}.".startswith(tuple(f"{used}." for used in _USED)):
            raise ArgosyError(
                "config.conflict",
                f"argosy bench trains fresh weights on synthetic tokens and writes no run directory: {key} would have no effect",
                key=key,
                value=value,
                fix=f"remove it (keys with an effect: {', '.join(_USED)}); `argosy train RUN.yaml --profile` profiles steps of a run",
            )

"""Rope settings in config.json.

Files up to transformers 4 have `rope_theta` and `rope_scaling`; transformers 5 writes both into `rope_parameters`. We read
either and write both, so that old and new readers load the file.
"""

from __future__ import annotations

from typing import Any

from argosy.config.model import ModelSpec
from argosy.families.hf_keys import Keys


def read_rope(keys: Keys, *, theta: float = 10_000.0, max_seq_len: int) -> dict[str, Any]:
    theta = keys.take("rope_theta", theta)
    keys.only("partial_rotary_factor", 1.0, None)
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    rope = old if keys.take("rope_scaling", None) else new
    (new if rope is old else old).ignore("transformers, too, lets the older form win", *ROPE_KEYS)
    theta = rope.take("rope_theta", theta)
    rope.only("partial_rotary_factor", 1.0, None)
    scaling = read_scaling(rope, max_seq_len)
    old.finish()
    new.finish()
    return {"rope_theta": theta, "rope_scaling": scaling}


def read_scaling(rope: Keys, max_seq_len: int) -> dict[str, Any] | None:
    """Return our keys for a section with rope scaling, or None if frequencies are not scaled."""
    old_name = rope.take("type", "default")
    kind = rope.take("rope_type", old_name)
    if kind == "default":
        return None
    if kind == "linear":
        return {"kind": kind, "factor": rope.take("factor", None)}
    if kind == "llama3":
        return {
            "kind": kind,
            "factor": rope.take("factor", None),
            "low_freq_factor": rope.take("low_freq_factor", None),
            "high_freq_factor": rope.take("high_freq_factor", None),
            "original_seq_len": rope.take("original_max_position_embeddings", max_seq_len),
        }
    raise rope.refuse("rope_type", kind, "only 'default', 'linear' and 'llama3' rotary scaling can be represented")


ROPE_KEYS = (
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip


def write_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    if spec.rope_scaling is None:
        return None
    scaling: dict[str, Any] = {"rope_type": spec.rope_scaling.kind, "factor": spec.rope_scaling.factor}
    if spec.rope_scaling.kind == "llama3":
        scaling |= {
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_seq_len,
        }
    return scaling


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    scaling = write_scaling(spec)
    parameters = {"rope_theta": spec.rope_theta} | (scaling or {"rope_type": "default"})
    return {"rope_theta": spec.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}

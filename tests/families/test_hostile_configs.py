"""A config.json with any value under any key gives a model spec or an ArgosyError, in time that does not depend on the value."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint.hf.hf_files import open_hf
from argosy.config.units import MOST_LAYERS
from argosy.errors import ArgosyError
from argosy.families.hf_config import FORMATS, from_config, key_fates
from hf_models import save

VALUES: list[Any] = [
    0, -1, 2_000_000_000, 2**63, 10**400, 0.0, 0.5, 1e300, float("inf"), float("nan"), True, None, "5", "abc", [], [1], [[1]],
    {}, {"a": 1}, [{}],
]  # fmt: skip
# Beyond this, memory was taken for a value before it was checked.
MOST_BYTES = 16 * 2**20
ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def documents(kind: str) -> list[dict[str, Any]]:
    plain: dict[str, Any] = {"model_type": kind}
    found = [plain | {key: value} for key in key_fates(kind) for value in VALUES]
    for section in ("rope_scaling", "rope_parameters"):
        for key in (*ROPE, "original_max_position_embeddings", "rope_theta", "full_attention"):
            found += [plain | {section: ROPE | {key: value}} for value in VALUES]
    return found + [plain | {"attn_config": {"attn_pdrop": value}} for value in VALUES]


@pytest.mark.parametrize("kind", FORMATS)
def test_any_value_of_any_key_is_read_or_refused(kind: str) -> None:
    from_config({"model_type": kind})
    tracemalloc.start()
    try:
        for document in documents(kind):
            with contextlib.suppress(ArgosyError):
                from_config(document)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("qwen3", {"num_hidden_layers": 0}, "at least 1"),
        ("qwen3", {"num_hidden_layers": 2_000_000_000}, "at most 10,000"),
        ("gemma3_text", {"num_hidden_layers": 10_001}, "at most 10,000"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "at least 1"),
        ("gemma3_text", {"_sliding_window_pattern": -2}, "at least 1"),
    ],
)
def test_the_refusal_says_which_numbers_are_allowed(kind: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgosyError, match=said) as refusal:
        from_config({"model_type": kind, **keys})
    assert refusal.value.key in keys


@pytest.mark.parametrize(
    ("keys", "every"),
    [
        ({}, 6),
        ({"sliding_window_pattern": 4}, 4),
        ({"sliding_window_pattern": 10**9}, 10**9),
        # A list of layers takes precedence over the number.
        ({"sliding_window_pattern": 0, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, 3),
        ({"layer_types": ["full_attention"] * 3}, 1),
        ({"layer_types": ["sliding_attention"] * 3}, 6),
        ({"sliding_window_pattern": 2, "layer_types": ["sliding_attention"] * 3}, 4),
    ],
)
def test_gemmas_layers_are_read_from_the_number_or_the_list(keys: dict[str, Any], every: int) -> None:
    assert from_config({"model_type": "gemma3_text", "num_hidden_layers": 3, **keys}).global_every == every


def test_the_most_layers_are_those_of_a_model_spec() -> None:
    assert from_config({"model_type": "qwen3", "num_hidden_layers": MOST_LAYERS}).layers == MOST_LAYERS
    with pytest.raises(ArgosyError, match="layers"):
        from_config({"model_type": "gpt2", "n_layer": MOST_LAYERS + 1})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mixtral", "num_local_experts", 2_000_000_000),
        ("qwen3_moe", "num_experts", 2_000_000_000),
        ("llama", "vocab_size", 10**18),
        ("llama", "num_hidden_layers", 2000),
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused_before_memory_is_taken(
    name: str, key: str, value: int, tmp_path: Path
) -> None:
    save(name, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("num_local_experts", None)
    path.write_text(json.dumps(config | {key: value}))
    tracemalloc.start()
    try:
        with pytest.raises(ArgosyError) as refusal:
            open_hf(tmp_path)
        # Reading a JSON file takes 64 MiB.
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20 + 4 * MOST_BYTES
    finally:
        tracemalloc.stop()
    assert refusal.value.code == "hf.bad-files"

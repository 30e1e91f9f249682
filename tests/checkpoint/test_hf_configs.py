"""Whatever one key of a config is changed to: what transformers then computes is computed here too, or refused."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor

from argosy.checkpoint.hf.hf_files import open_hf
from argosy.errors import ArgosyError
from argosy.model.build import build_model
from hf_models import MODELS

Config = dict[str, Any]
TOKENS = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(1))
WORDS = ["gelu", "gelu_new", "relu", "silu", "gelu_fast", "tanh", "gated-gelu", "gated-silu", "gated-relu", None]
SHORT = 12  # changes of each model in the short form


def others(value: Any) -> list[Any]:
    """What somebody may have written in its place."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, 0, 1, None]
    if isinstance(value, float):
        return [2 * value + 0.1, 50 * value, 0.0, None]
    if isinstance(value, str):
        return WORDS
    if value is None:
        return [True, 0, 1, 7, 0.5, "gelu", [0], [1], {"a": 1}]
    return [[], [0], [1], None] if isinstance(value, list) else [{}, None]


def changed(config: Config) -> Iterator[tuple[str, Config]]:
    """The config with one key, or one key of a part of it, changed or taken away."""
    for key, value in config.items():
        if key in ("model_type", "architectures", "transformers_version", "dtype", "return_dict"):
            continue
        for other in others(value):
            yield f"{key} = {other!r}", config | {key: other}
        yield f"without {key}", {k: v for k, v in config.items() if k != key}
        for inner, part in value.items() if isinstance(value, dict) else ():
            for other in others(part):
                yield f"{key}.{inner} = {other!r}", config | {key: value | {inner: other}}


def theirs(config: Config, directory: Path) -> Tensor | None:
    """Their logits, and the model saved; None where they cannot make, run or save it."""
    kind: Any = getattr(T, config["architectures"][0])
    torch.manual_seed(0)
    try:
        model = kind(kind.config_class.from_dict(copy.deepcopy(config))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
            more = {"decoder_input_ids": TOKENS.flip(1)} if config["model_type"] == "t5" else {}
            output = model(input_ids=TOKENS, **more)
        model.save_pretrained(directory)
    except Exception:  # noqa: BLE001  whatever it was: theirs is not what is tried here
        return None
    found: Tensor = output["prediction_logits" if "prediction_logits" in output else "logits"]
    return found if bool(found.isfinite().all()) else None


def ours(config: Config, directory: Path) -> Tensor | None:
    """Our logits; None where the config is refused, or the tokens are more than it says the model is for."""
    (directory / "config.json").write_text(json.dumps(config))
    try:
        found = open_hf(directory)
    except ArgosyError:
        return None
    if found.spec.max_seq_len < TOKENS.shape[1]:
        return None
    model = build_model(found.spec).eval()
    more = {"decoder_tokens": TOKENS.flip(1)} if config["model_type"] == "t5" else {}
    with torch.no_grad():
        for name, slot in model.state_dict().items():
            slot.copy_(found.read(name))
        logits: Tensor = model(TOKENS, **more)
    return logits


def check(kind: str, directory: Path, most: int | None) -> None:
    model = MODELS[kind]()
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    changes = list(changed(config))
    sample = changes if most is None else random.Random(kind).sample(changes, most)
    computed = 0
    for number, (what, one) in enumerate([("as it is", config), *sample]):
        place = directory / str(number)
        if (expected := theirs(one, place)) is None or (found := ours(one, place)) is None:
            continue
        computed += 1
        error = (found - expected).abs().max() / expected.abs().max()
        assert found.shape == expected.shape, f"{kind}, {what}"
        assert float(error) < 1e-5, f"{kind}, {what}: the logits differ by {float(error):.1e}"
    assert computed > len(sample) // 5


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: nothing to initialise where a size is 0
@pytest.mark.parametrize("kind", MODELS)
def test_a_changed_key_is_followed_or_refused(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, SHORT)


# Found in the files of models people start from, and read by nothing in transformers.
PASSED_OVER: dict[str, Config] = {
    "bert-masked": {
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "eos_token_ids": 0, "xla_device": True,
    },
    "gpt2": {"_num_labels": 1},
    "llama3": {
        "is_llama_config": True, "rope_interleaved": False, "unsloth_fixed": True, "max_sequence_length": 2048,
        "transformers.js_config": {"dtype": "q4"}, "_flash_attn_2_enabled": True, "mask_token_id": 3,
    },
    "qwen3_moe": {"use_qk_norm": True, "shared_expert_intermediate_size": 0, "qkv_bias": False},
}  # fmt: skip
REFUSED = {
    "bert-masked": {"directionality": "left"},
    "llama3": {"rope_interleaved": True},
    "qwen3_moe": {"use_qk_norm": False, "shared_expert_intermediate_size": 16, "qkv_bias": True},
}


@pytest.mark.parametrize("kind", PASSED_OVER)
def test_keys_that_published_models_carry_and_nobody_reads_are_passed_over(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    config |= PASSED_OVER[kind]
    expected, found = theirs(config, tmp_path), ours(config, tmp_path)
    assert expected is not None
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for key, value in REFUSED.get(kind, {}).items():
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ArgosyError) as refused:
            open_hf(tmp_path)
        assert (refused.value.code, refused.value.key) == ("hf.unsupported", key)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: nothing to initialise where a size is 0
@pytest.mark.parametrize("kind", MODELS)
def test_every_changed_key_is_followed_or_refused(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, None)

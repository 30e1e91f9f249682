"""Whatever model can be said in a config of theirs is exported, and transformers computes what we do; every other is refused
by a key of the model."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf
from argosy.checkpoint.model_directory import write_model
from argosy.checkpoint.source import Source
from argosy.checkpoint.tensors import TensorInfo
from argosy.config.model import ModelSpec
from argosy.errors import ArgosyError
from argosy.families.family_registry import FAMILIES
from argosy.families.hf_config import to_config
from argosy.model.build import build_model

LLAMA3 = {"kind": "llama3", "factor": 4, "original_seq_len": 8, "low_freq_factor": 1, "high_freq_factor": 3}


def drawn(rng: random.Random) -> dict[str, Any]:
    """Keys of a small model: odd sizes, and now and then a choice its family does not have."""
    family, heads = rng.choice(["gpt", "llama", "llama", "llama", "mpt", "bert", "t5"]), rng.choice([1, 2, 3, 5, 6])
    keys: dict[str, Any] = {
        "family": family, "layers": rng.randint(1, 3), "heads": heads, "hidden": heads * rng.choice([2, 4, 10]),
        "vocab_size": rng.choice([67, 130]), "max_seq_len": rng.choice([8, 40]),
    }  # fmt: skip
    now_and_then: list[tuple[float, str, list[Any]]] = [
        (0.3, "head_dim", [2, 6, 8]), (0.3, "kv_heads", [1, heads]), (0.4, "ffn", [4, 33]), (0.3, "tied", [True, False]),
        (0.2, "activation", ["gelu", "gelu_tanh", "relu", "swiglu", "geglu"]), (0.2, "norm_eps", [1e-2]),
        (0.1, "attention_bias", [True, False]), (0.1, "mlp_bias", [True, False]),
    ]  # fmt: skip
    if family == "llama":
        now_and_then += [
            (0.4, "qk_norm", [True]), (0.4, "window", [1, 4, 100]), (0.4, "rope_theta", [100.0, 5e5]),
            (0.4, "rope_scaling", [{"kind": "linear", "factor": 3}, LLAMA3]),
        ]  # fmt: skip
        if rng.random() < 0.4:
            moe: dict[str, Any] = {"experts": 4, "top_k": rng.randint(1, 4), "ffn": rng.choice([7, 16])}
            keys["moe"] = moe | rng.choice([{}, {"norm_topk": False}, {"dense_layers": 1}, {"router": "sigmoid"}])
    own = {"bert": ("pair", ["nsp", "sop", "none"]), "t5": ("decoder_layers", [1, 2, 3])}
    now_and_then += [(0.5, *own[family])] if family in own else []
    return keys | {key: rng.choice(values) for share, key, values in now_and_then if rng.random() < share}


def exported(spec: ModelSpec, directory: Path) -> str:
    """Their name for it, once it has been compared with theirs."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.2 * torch.randn(t.shape, generator=generator) for name, t in build_model(spec).state_dict().items()
    }
    infos = {name: TensorInfo.of(t) for name, t in weights.items()}
    like = Source("drawn", spec, infos, weights.__getitem__, directory, None, spec.vocab_size, None, {})
    write_model(directory / "ours", like, "drawn", infos, weights.__getitem__)
    found = export_hf(str(directory / "ours"), directory / "theirs", ExportOptions(shard_size=30_000))
    assert any("equal those of transformers" in note for note in found.notes), found.notes
    return found.model_type


@pytest.mark.parametrize("seed", range(4))
def test_any_model_is_exported_as_it_computes_or_refused_by_key(seed: int, tmp_path: Path) -> None:
    rng, kinds, refused = random.Random(seed), set(), []
    for _ in range(30):
        try:
            spec = ModelSpec.model_validate(FAMILIES[(keys := drawn(rng))["family"]].defaults | keys)
        except ValidationError:
            continue
        try:
            to_config(spec)
        except ArgosyError as error:
            refused.append((error.code, str(error.key).partition(".")[0]))
            continue
        kinds.add(exported(spec, tmp_path))
        shutil.rmtree(tmp_path / "ours")
        shutil.rmtree(tmp_path / "theirs")
    assert set(refused) == {("hf.unsupported", "model")}
    assert len(kinds) >= 4

"""Exported models load in transformers with the same logits, without padding, and are whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from argosy.checkpoint.hf import hf_verify
from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf
from argosy.checkpoint.hf.hf_import import import_hf
from argosy.checkpoint.source import open_source
from argosy.config.resolve import resolve
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from argosy.infer.loading import load_model
from argosy.train.run import TrainOptions, train
from hf_models import MODELS, save
from tiny import TINY_MODEL

TOKENS = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(1))


def _theirs(directory: Path, kind: str) -> torch.Tensor:
    config = json.loads((directory / "config.json").read_text())
    model = getattr(T, config["architectures"][0]).from_pretrained(directory, dtype=torch.float32).eval()
    more = {"decoder_input_ids": TOKENS.flip(1)} if kind.startswith("t5") else {}
    with torch.no_grad():
        output = model(input_ids=TOKENS, **more)
    return output.prediction_logits if "prediction_logits" in output else output.logits


@pytest.fixture
def trained(write_spec: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A run of one step with the byte tokenizer; keyword arguments replace sections of its spec."""

    def make(**sections: Any) -> Path:
        path = write_spec(train={"global_batch": 8, "steps": 1}, optim={"lr": 1e-2}, **sections)
        if sections.get("model", 0) is None:
            path.write_text(path.read_text().replace("model: null\n", ""))
        train(resolve(path), path, TrainOptions(quiet=True))
        return tmp_path / "runs" / "tiny"

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_without_training_is_the_same_model(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path / "hf", max_shard_size="60KB")
    import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    found = export_hf(str(tmp_path / "ours"), tmp_path / "back", ExportOptions(shard_size=50_000))
    assert len(found.files) > 1
    assert any("equal those of transformers" in note for note in found.notes)
    torch.testing.assert_close(_theirs(tmp_path / "back", kind), _theirs(tmp_path / "hf", kind), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "mistral", "qwen3", "mpt", "mixtral", "qwen3_moe"])
def test_a_trained_step_is_exported_as_we_compute_it(kind: str, tmp_path: Path, trained: Any) -> None:
    save(kind, tmp_path / "hf")
    before = _theirs(tmp_path / "hf", kind)
    run = trained(init_from=f"hf:{tmp_path / 'hf'}", model=None)
    export_hf(str(run), tmp_path / "back", ExportOptions())
    after = _theirs(tmp_path / "back", kind)
    with torch.no_grad():
        ours = load_model(str(run), device="cpu").model(TOKENS)
    torch.testing.assert_close(after, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    assert float((after - before).abs().max()) > 1e-2
    model = T.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.config.eos_token_id == 256


def test_a_gemma3_at_its_defaults_is_exported_as_we_compute_it(tmp_path: Path, trained: Any) -> None:
    run = trained(model={"family": "gemma3", "layers": 7, "hidden": 32, "heads": 2, "vocab_size": 257, "window": 9})
    export_hf(str(run), tmp_path / "back", ExportOptions())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["query_pre_attn_scalar"] == 16
    with torch.no_grad():
        ours = load_model(str(run), device="cpu").model(TOKENS)
    after = _theirs(tmp_path / "back", "gemma3_text")
    torch.testing.assert_close(after, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


def test_noise_belongs_to_a_run_and_not_to_its_model(tmp_path: Path, trained: Any) -> None:
    run = trained(model={**TINY_MODEL, "embed_noise": 5.0})
    export_hf(str(run), tmp_path / "out", ExportOptions())
    assert T.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
    keys = ["data.train=corpus", "train.global_batch=8", "train.steps=1", "optim.lr=1e-3"]
    assert resolve(None, [f"init_from={run}", *keys]).spec.model.embed_noise == 0


def test_token_ids_are_those_the_model_came_with_and_no_others(tmp_path: Path, trained: Any) -> None:
    save("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": None, "eos_token_id": [256, 7]}))
    export_hf(str(trained(init_from=f"hf:{tmp_path / 'hf'}", model=None)), tmp_path / "back", ExportOptions())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["eos_token_id"] == [256, 7]
    assert config.get("bos_token_id") is None


def test_padding_is_removed_and_the_tokenizer_gives_the_same_ids(tmp_path: Path, trained: Any) -> None:
    run = trained(model={"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab_size": 320})
    found = export_hf(str(run), tmp_path / "back", ExportOptions())
    assert found.padding_removed == 63
    model = T.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 257
    tokenizer = T.AutoTokenizer.from_pretrained(tmp_path / "back")
    text = "Grüße, 世界!\n\tx = 1  # \x00 \U0001f600 <|endoftext|x"
    ids = ByteTokenizer().encode(text)
    assert tokenizer(text)["input_ids"] == ids
    assert set(tokenizer(text)) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 256
    kept = export_hf(str(run), tmp_path / "kept", ExportOptions(keep_padding=True))
    assert kept.padding_removed == 0


def test_rows_the_original_model_had_are_no_padding(tmp_path: Path, trained: Any) -> None:
    save("llama", tmp_path / "hf", vocab_size=300)
    run = trained(init_from=f"hf:{tmp_path / 'hf'}", model={"vocab_size": 384})
    assert export_hf(str(run), tmp_path / "back", ExportOptions()).padding_removed == 84


@pytest.mark.parametrize(
    ("model", "section", "rows", "ids"),
    [
        ({"family": "bert"}, {"bert": {"cls": 257, "sep": 258, "mask": 259, "pad": 260}}, 261, {"pad_token_id": 260}),
        (
            {"family": "t5"},
            {"t5": {"sentinel": 299, "sentinels": 30, "eos": 257, "pad": 258}},
            300,
            {"eos_token_id": 257, "pad_token_id": 258, "decoder_start_token_id": 258},
        ),
    ],
)
def test_special_tokens_beyond_the_tokenizer_are_no_padding(
    tmp_path: Path, trained: Any, corpus: Path, model: Any, section: Any, rows: int, ids: Any
) -> None:
    model |= {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 320}
    run = trained(model=model, data={"train": str(corpus), "seq_len": 32, "split": [90, 10, 0]} | section)
    export_hf(str(run), tmp_path / "back", ExportOptions())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["vocab_size"] == rows
    assert {key: config[key] for key in ids} == ids
    given = set(T.AutoTokenizer.from_pretrained(tmp_path / "back")("a", "b"))
    assert given == {"input_ids", "attention_mask"} | ({"token_type_ids"} if model["family"] == "bert" else set())


def test_an_exported_t5_generates_without_being_told_where_to_start(tmp_path: Path) -> None:
    save("t5", tmp_path / "hf")
    assert "decoder_start_token_id" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "generation_config.json").unlink()
    export_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "back", ExportOptions(verify=False))
    model = T.T5ForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert model.generation_config.decoder_start_token_id == 0
    assert model.generate(TOKENS[:, :5], max_new_tokens=3, use_cache=False)[0, 0] == 0


def test_precision_shards_and_index_are_as_asked(tmp_path: Path, trained: Any) -> None:
    run = trained()
    found = export_hf(str(run), tmp_path / "back", ExportOptions(dtype="bf16", shard_size=20_000))
    assert found.dtype == "bfloat16"
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.bytes
    for name in found.files:
        with safe_open(tmp_path / "back" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
            assert sum(sizes) <= 20_000 or len(sizes) == 1
    assert T.AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.bfloat16


def test_experts_of_an_odd_width_are_compared_too(tmp_path: Path, trained: Any) -> None:
    moe = {"experts": 3, "top_k": 2, "ffn": 7}
    run = trained(model={"family": "llama", "layers": 1, "hidden": 6, "heads": 1, "vocab_size": 257, "moe": moe})
    found = export_hf(str(run), tmp_path / "back", ExportOptions())
    assert any("equal those of transformers" in note for note in found.notes)


@pytest.mark.parametrize(
    ("of_norms", "of_others", "written"),
    [
        (torch.bfloat16, torch.float16, "float32"),  # neither holds the other's numbers
        (torch.float32, torch.bfloat16, "float32"),
        (torch.float64, torch.float64, "float64"),
    ],
)
def test_the_precision_in_the_config_holds_every_weight(
    of_norms: torch.dtype, of_others: torch.dtype, written: str, tmp_path: Path
) -> None:
    save("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    weights = {name: t.to(of_norms if "norm" in name else of_others) for name, t in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    assert export_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "back", ExportOptions()).dtype == written
    loaded = T.LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(loaded[name], t.to(loaded[name].dtype)) for name, t in weights.items())


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_weights_that_are_no_numbers_are_named_and_not_blamed_on_disk_or_conversion(value: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float(value)
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(
        ArgosyError, match=r"layers\.1\.mlp\.up_proj\.weight in .* holds 1 numbers of 3,840 that are NaN or infinite"
    ):
        export_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "back", ExportOptions())
    assert not (tmp_path / "back").exists()


def test_a_weight_that_the_precision_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ArgosyError, match=r"layers\.1\.mlp\.up\.weight holds 100000.*65504") as refused:
        export_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "back", ExportOptions(dtype="fp16"))
    assert refused.value.key == "--dtype"
    assert not (tmp_path / "back").exists()


def test_nothing_is_overwritten_and_a_dry_run_writes_nothing(tmp_path: Path, trained: Any) -> None:
    run = trained()
    export_hf(str(run), tmp_path / "back", ExportOptions(), dry_run=True)
    assert not (tmp_path / "back").exists()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "note").touch()
    with pytest.raises(ArgosyError) as refused:
        export_hf(str(run), tmp_path / "back", ExportOptions())
    assert refused.value.code == "hf.exists"


def test_a_model_that_would_compute_something_else_is_not_kept(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained()
    real = hf_verify._their_logits
    monkeypatch.setattr(hf_verify, "_their_logits", lambda *arguments: real(*arguments) + 1)
    with pytest.raises(ArgosyError) as refused:
        export_hf(str(run), tmp_path / "back", ExportOptions())
    assert refused.value.code == "hf.differs"
    assert not (tmp_path / "back").exists()
    assert list(tmp_path.glob(".back*")) == []


def test_a_model_too_large_for_memory_is_compared_as_far_as_it_fits(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained()
    spec = open_source(str(run)).model
    one, two = (hf_verify._need(hf_verify._cut(spec, layers)) for layers in (1, 2))
    assert hf_verify.what_fits(spec, two).layers == 2
    found = export_hf(str(run), tmp_path / "cut", ExportOptions(shard_size=int(one / 2)))
    assert any("1 of 2 layers" in note and "equal those of transformers" in note for note in found.notes)
    assert not (tmp_path / "cut" / "less").exists()
    monkeypatch.setattr(hf_verify, "available_memory", lambda: one - 1)
    found = export_hf(str(run), tmp_path / "none", ExportOptions())
    assert any("were not compared" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "bert", "t5-1.1"])
def test_every_kind_of_model_can_be_compared_in_part(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(kind, tmp_path / "hf")
    monkeypatch.setattr(hf_verify, "_ROWS", 100)
    found = export_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "back", ExportOptions(shard_size=1))
    assert any("100 tokens" in note and "equal those of transformers" in note for note in found.notes)


def test_a_model_none_of_their_classes_computes_is_refused_before_any_work(tmp_path: Path, trained: Any) -> None:
    model = {"family": "gpt", "layers": 1, "hidden": 32, "heads": 4, "vocab_size": 257, "positions": "rope"}
    run = trained(model=model)
    with pytest.raises(ArgosyError) as refused:
        export_hf(str(run), tmp_path / "back", ExportOptions())
    assert (refused.value.code, refused.value.key) == ("hf.unsupported", "model.positions")

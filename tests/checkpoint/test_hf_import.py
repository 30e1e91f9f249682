"""Imported models compute what they computed, are whole or absent, and are refused in words when their files are not
what their config says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf
from argosy.checkpoint.hf.hf_files import open_hf
from argosy.checkpoint.hf.hf_import import import_hf
from argosy.checkpoint.source import open_source
from argosy.checkpoint.store import latest
from argosy.config.start import starting_model
from argosy.data.text.tokenizer import train_bpe
from argosy.errors import ArgosyError
from argosy.infer.loading import load_model
from checkpoint.full_disk import full_beyond
from hf_models import DECODERS, save
from peak_memory import peak_growth

TOKENS = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("kind", DECODERS)
def test_an_imported_model_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path / "hf", max_shard_size="60KB")
    import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    for where in (str(tmp_path / "ours"), f"hf:{tmp_path / 'hf'}"):
        model = load_model(where, device="cpu").model
        with torch.no_grad():
            expected, found = theirs(input_ids=TOKENS).logits, model(TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_home_directory_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("llama", tmp_path / "models" / "hf")
    assert import_hf("hf:~/models/hf", tmp_path / "ours").model_type == "llama"
    assert open_source("hf:~/models/hf").model == starting_model("hf:~/models/hf")
    with pytest.raises(ArgosyError, match="~nobody-of-that-name"):
        import_hf("hf:~nobody-of-that-name/hf", tmp_path / "other")


def test_weights_keep_their_precision_and_carry_hashes(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    weights = {name: t.bfloat16() for name, t in load_file(tmp_path / "hf" / "model.safetensors").items()}
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    checkpoint = latest(tmp_path / "ours" / "checkpoints", report=lambda text: None)
    assert checkpoint is not None
    assert {t.dtype for t in checkpoint.weights().values()} == {torch.bfloat16}


def test_older_files_are_read_names_without_prefix_masks_and_a_stored_tied_head(tmp_path: Path) -> None:
    theirs = save("gpt2", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)} | {
        "lm_head.weight": old["wte.weight"].clone()
    }
    save_file(old, path)
    found = import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    assert found.unused == ["h.0.attn.bias", "h.1.attn.bias"]
    model = load_model(str(tmp_path / "ours"), device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-4)


def _edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda w: w.update({"model.layers.0.extra": torch.ones(2)}), "holds model.layers.0.extra"),
        (lambda w: w.update({"model.norm.weight": torch.ones(47)}), r"\[47\].*asks for \[48\]"),
        (
            lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(7, 48)}),
            r"k_proj.weight has .*\[7, 48\]",
        ),
        (lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.uint8)}), "not floating-point"),
    ],
)
def test_wrong_tensors_are_named(llama: Path, tmp_path: Path, change: Any, says: str) -> None:
    _edit(llama, change)
    with pytest.raises(ArgosyError, match=says) as refused:
        import_hf(f"hf:{llama}", tmp_path / "ours")
    assert refused.value.code == "hf.bad-files"
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("mpt", "transformer.blocks.0.attn.Wqkv.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias"),
    ],
)
def test_one_wrong_part_of_a_parameter_is_named(kind: str, name: str, tmp_path: Path) -> None:
    save(kind, tmp_path / "hf")
    for wrong in (torch.ones(()), torch.ones(0), torch.ones(3, 5)):
        _edit(tmp_path / "hf", lambda w, wrong=wrong: w.update({name: wrong}))
        with pytest.raises(ArgosyError, match=re.escape(f"{name} has shape {list(wrong.shape)}")):
            import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")


def test_experts_that_are_stored_together_are_refused_with_the_way_to_part_them(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "hf", save_original_format=False)
    with pytest.raises(ArgosyError, match="experts are stored together"):
        import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("llama3", "model.embed_tokens.weight", "lm_head.weight"),
        ("t5", "shared.weight", "decoder.embed_tokens.weight"),
        ("bert", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_a_tied_weight_is_found_under_any_of_its_names(kind: str, name: str, other: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path / "hf")
    _edit(tmp_path / "hf", lambda w: w.update({other: w.pop(name)}))
    found = open_hf(tmp_path / "hf")
    assert torch.equal(found.read_theirs(name), theirs.state_dict()[name])


def test_a_head_of_its_own_is_not_taken_for_the_embedding(llama: Path) -> None:
    _edit(llama, lambda w: w.pop("model.embed_tokens.weight"))
    with pytest.raises(ArgosyError, match=r"lacks model\.embed_tokens\.weight"):
        open_hf(llama)


def test_a_tied_head_that_differs_is_not_dropped(tmp_path: Path) -> None:
    save("llama3", tmp_path / "hf")
    _edit(tmp_path / "hf", lambda w: w.update({"lm_head.weight": torch.ones(257, 48)}))
    with pytest.raises(ArgosyError, match="tie_word_embeddings"):
        import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")


def test_a_truncated_file_is_refused_before_anything_is_written(llama: Path, tmp_path: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArgosyError, match="its header promises"):
        import_hf(f"hf:{llama}", tmp_path / "ours")


def test_a_missing_shard_and_an_index_that_leads_outside_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf", max_shard_size="60KB")
    shard = sorted((tmp_path / "hf").glob("model-*"))[1]
    shard.rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ArgosyError, match=f"lacks the shard {shard.name}"):
        import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "../elsewhere.safetensors"))
    with pytest.raises(ArgosyError, match="no file beside it"):
        import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")


def test_pickles_are_never_opened(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ArgosyError, match="a pickle") as refused:
        import_hf(f"hf:{llama}", tmp_path / "ours")
    assert "save_pretrained" in refused.value.fix


def test_a_file_that_is_not_the_one_published_is_refused(llama: Path, tmp_path: Path) -> None:
    note = llama / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("0" * 40 + "\n" + "1" * 64 + "\n1700000000.0\n")
    with pytest.raises(ArgosyError, match="it was published with"):
        import_hf(f"hf:{llama}", tmp_path / "ours")
    assert list(tmp_path.glob(".ours*")) == []


def test_nothing_is_overwritten_and_a_dry_run_writes_nothing(llama: Path, tmp_path: Path) -> None:
    import_hf(f"hf:{llama}", tmp_path / "ours", dry_run=True)
    assert not (tmp_path / "ours").exists()
    import_hf(f"hf:{llama}", tmp_path / "ours")
    with pytest.raises(ArgosyError) as refused:
        import_hf(f"hf:{llama}", tmp_path / "ours")
    assert refused.value.code == "hf.exists"


def test_a_full_disk_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    with full_beyond(100_000), pytest.raises(ArgosyError) as refused:
        import_hf(f"hf:{llama}", tmp_path / "ours")
    assert refused.value.code == "hf.write-failed"
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


LARGE = {
    "model_type": "llama", "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
SHARD = 60_000_000


def test_importing_and_exporting_take_less_memory_than_two_shards(llama: Path, tmp_path: Path) -> None:
    from argosy.checkpoint.hf.hf_convert import entries, to_theirs
    from argosy.checkpoint.tensors import TensorInfo, write_stream
    from argosy.families.hf_config import from_config
    from argosy.model.build import build_model

    spec = from_config(LARGE)
    sizes = dict(build_model(spec, "meta").named_parameters())
    theirs: dict[str, TensorInfo] = {}
    for entry in entries(spec):
        parts = to_theirs(entry, sizes[entry.ours].to(torch.bfloat16))
        theirs |= {name: TensorInfo.of(part) for name, part in parts.items()}
    shards: list[dict[str, TensorInfo]] = [{}]
    for name, info in theirs.items():
        if sum(i.nbytes for i in shards[-1].values()) + info.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = info
    (tmp_path / "hf").mkdir()
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number}.safetensors"
        write_stream(tmp_path / "hf" / name, shard, lambda n, s=shard: torch.zeros(s[n].shape, dtype=s[n].dtype))
        weight_map |= dict.fromkeys(shard, name)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    notes: list[str] = []

    def there(name: str, source: Path) -> int:
        return peak_growth(lambda: import_hf(f"hf:{source}", tmp_path / name))

    def back(name: str) -> int:
        options = ExportOptions(shard_size=SHARD)
        place = tmp_path / f"{name}-back"
        return peak_growth(lambda: notes.extend(export_hf(str(tmp_path / name), place, options).notes))

    # What is imported and kept the first time.
    there("small", llama)
    back("small")
    notes.clear()
    imported, exported = there("large", tmp_path / "hf"), back("large")
    assert len(shards) >= 3
    assert len(list((tmp_path / "large-back").glob("model-*"))) >= 3
    assert "equal" in " ".join(notes).split()
    assert max(imported, exported) < 2 * SHARD, f"{imported} bytes more to import, {exported} to export"


def test_a_head_that_is_not_stored_because_it_equals_the_embedding_is_a_copy_of_it(tmp_path: Path) -> None:
    save("t5-1.1", tmp_path / "hf")
    found = import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    assert found.copied == {"lm_head.weight": "shared.weight"}
    assert "lm_head.weight is not in the files: it begins as shared.weight" in found.describe(done=True)
    model = load_model(str(tmp_path / "ours"), device="cpu").model
    weights = dict(model.named_parameters())
    assert torch.equal(weights["head.weight"], weights["embed.tokens.weight"])


@pytest.mark.parametrize("name", ["cls.predictions.decoder.bias", "cls.predictions.bias"])
def test_the_bias_of_a_head_of_its_own_is_found_under_either_name(name: str, tmp_path: Path) -> None:
    save("bert-untied", tmp_path / "hf")
    bias = torch.randn(257)

    def keep_one(weights: dict[str, Any]) -> None:
        del weights["cls.predictions.decoder.bias"], weights["cls.predictions.bias"]
        weights[name] = bias

    _edit(tmp_path / "hf", keep_one)
    import_hf(f"hf:{tmp_path / 'hf'}", tmp_path / "ours")
    model = load_model(str(tmp_path / "ours"), device="cpu").model
    assert torch.equal(dict(model.named_parameters())["head.bias"], bias)


def test_of_two_sets_of_weights_the_one_transformers_loads_is_read(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00001.safetensors"}}')
    assert import_hf(f"hf:{llama}", tmp_path / "ours").files == 1


def test_a_directory_that_is_not_there_is_told_from_one_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ArgosyError, match="there is no directory") as refused:
        import_hf(f"hf:{tmp_path / 'gpt2'}", tmp_path / "ours")
    assert "hf download" in refused.value.fix
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ArgosyError, match=r"has no config\.json"):
        import_hf(f"hf:{tmp_path / 'gpt2'}", tmp_path / "ours")


def test_a_model_without_a_tokenizer_says_so(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer_config.json").write_text("{}")  # settings of a tokenizer are none
    assert "it has no tokenizer" in import_hf(f"hf:{llama}", tmp_path / "bare").describe(done=True)
    (llama / "tokenizer.json").write_text(train_bpe(["some words"], 257))
    assert "it has no tokenizer" not in import_hf(f"hf:{llama}", tmp_path / "ours").describe(done=True)


def test_a_checkpoint_that_is_not_there_is_not_called_damaged(llama: Path, tmp_path: Path) -> None:
    import_hf(f"hf:{llama}", tmp_path / "ours")
    with pytest.raises(ArgosyError) as refused:
        open_source(str(tmp_path / "ours" / "checkpoints" / "step-00000007"))
    assert refused.value.code == "run.not-found"
    assert "step-00000000" in refused.value.fix

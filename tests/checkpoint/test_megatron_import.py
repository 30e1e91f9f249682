"""Imported Megatron-LM checkpoints hold every weight and compute what Megatron-core computes. A checkpoint that does not fit the
given model is refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

from argosy.checkpoint.megatron.import_megatron import find_iteration, import_megatron
from argosy.checkpoint.megatron.torch_dist import TorchDist
from argosy.checkpoint.store import latest
from argosy.cli.app import app
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.errors import ArgosyError
from argosy.infer.loading import load_model
from argosy.model.build import build_model, initial_value
from argosy.parallel.shards import Box
from checkpoint.full_disk import full_beyond
from megatron_files import arguments_of, halves, megatron_state, whole, write_checkpoint
from peak_memory import peak_growth

PADDED = 128
SIZES = {"layers": 3, "hidden": 32, "heads": 4, "vocab_size": 120, "max_seq_len": 24}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", **SIZES},
    "llama": {"family": "llama", **SIZES, "kv_heads": 2, "ffn": 48},
    "tied": {"family": "llama", **SIZES, "kv_heads": 1, "ffn": 40, "tied": True, "head_dim": 16},
    "mixtral": {"family": "llama", **SIZES, "ffn": 48, "moe": {"experts": 4, "top_k": 2, "ffn": 20}},
}


def model_of(kind: str) -> tuple[ModelSpec, dict[str, Tensor]]:
    spec = resolve_model(MODELS[kind])
    shapes = {name: p.shape for name, p in build_model(spec, "meta").named_parameters()}
    noise = torch.Generator().manual_seed(5)
    return spec, {
        name: (initial_value(name, shape, spec, 1) + 0.1 * torch.randn(shape, generator=noise)).bfloat16()
        for name, shape in shapes.items()
    }


def logits(spec: ModelSpec, weights: dict[str, Tensor]) -> Tensor:
    model = build_model(spec)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    tokens = torch.arange(2 * 24).view(2, 24) % spec.vocab_size
    with torch.no_grad():
        return torch.as_tensor(model.eval()(tokens))


def imported(to: Path) -> dict[str, Tensor]:
    found = latest(to / "checkpoints", report=lambda text: None)
    assert found is not None
    return dict(found.weights())


@pytest.mark.parametrize("form", ["stacked", "apart", "single"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_weight_and_the_logits_are_bit_equal(kind: str, form: str, tmp_path: Path) -> None:
    spec, weights = model_of(kind)
    state = megatron_state(spec, weights, stacked=form == "stacked", padded=PADDED, single=form == "single")
    state |= {f"optimizer.state.exp_avg.{name}": tensor for name, tensor in list(state.items())[:2]}
    write_checkpoint(tmp_path / "run", state, arguments=arguments_of(spec, PADDED))
    found = import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours", changes=["vocab_size=120"])
    assert (found.rows, found.padding) == (128, 8)
    back = imported(tmp_path / "ours")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) and back[name].dtype == weight.dtype for name, weight in weights.items())
    model = load_model(str(tmp_path / "ours"), device="cpu").model
    with torch.no_grad():
        after = model(torch.arange(2 * 24).view(2, 24) % spec.vocab_size)
    assert torch.equal(after, logits(spec, weights))


def _with_masters(tmp_path: Path, kind: str, form: str, change: Any = None) -> dict[str, Tensor]:
    """Write a 16-bit checkpoint with fp32 master weights. Returns the master weights."""
    spec, weights = model_of(kind)
    # They round to the same 16 bits.
    masters = {name: w.float() * (1 + 2**-12) for name, w in weights.items()}
    like = {"stacked": form == "stacked", "padded": PADDED, "single": form == "single"}
    state = megatron_state(spec, weights, **like)
    prefix = "chained_0.optimizer.state.param" if form == "apart" else "optimizer.state.fp32_param"
    state |= {f"{prefix}.{name}": tensor for name, tensor in megatron_state(spec, masters, **like).items()}
    if change is not None:
        change(state)
    write_checkpoint(tmp_path / "run", state, arguments=arguments_of(spec, PADDED))
    return masters


@pytest.mark.parametrize(("kind", "form"), [("gpt", "stacked"), ("llama", "apart"), ("mixtral", "single")])
def test_the_optimisers_weights_in_32_bits_are_taken_where_it_kept_them(kind: str, form: str, tmp_path: Path) -> None:
    masters = _with_masters(tmp_path, kind, form)
    found = import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours", changes=["vocab_size=120"])
    assert found.masters
    assert all(torch.equal(back, masters[name]) for name, back in imported(tmp_path / "ours").items())
    found = import_megatron(
        f"megatron:{tmp_path / 'run'}", tmp_path / "rounded", masters=False, changes=["vocab_size=120"]
    )
    assert not found.masters
    assert all(torch.equal(b, masters[name].bfloat16()) for name, b in imported(tmp_path / "rounded").items())


def test_weights_in_32_bits_that_are_not_all_there_are_not_mixed_with_others(tmp_path: Path) -> None:
    name = "optimizer.state.fp32_param.decoder.final_layernorm.weight"
    masters = _with_masters(tmp_path, "llama", "stacked", lambda state: state.pop(name))
    found = import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours", changes=["vocab_size=120"])
    assert "as the model kept them" in found.describe(done=True)
    assert all(torch.equal(b, masters[name].bfloat16()) for name, b in imported(tmp_path / "ours").items())


def test_weights_in_32_bits_of_another_model_are_refused(tmp_path: Path) -> None:
    name = "optimizer.state.fp32_param.decoder.final_layernorm.weight"
    _with_masters(tmp_path, "llama", "stacked", lambda state: state[name].add_(1))
    with pytest.raises(ArgosyError, match=r"final_layernorm\.weight is not the rounding") as refused:
        import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours")
    assert "--no-masters" in refused.value.fix
    assert not (tmp_path / "ours").exists()


def test_the_files_of_this_test_are_what_torch_reads(tmp_path: Path) -> None:
    spec, weights = model_of("llama")
    state = megatron_state(spec, weights, stacked=True, padded=PADDED)
    place = write_checkpoint(tmp_path / "run", state)
    theirs = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    checkpoint.load(theirs, storage_reader=FileSystemReader(place), no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in state.items())


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_box_is_read_however_the_tensor_was_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    tensor = torch.randn(shape)
    edges = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]

    def cut(name: str, whole: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        parts: list[tuple[tuple[int, ...], Tensor]] = [((), whole)]
        for dim, ends in enumerate(edges):
            parts = [((*offset, a), part.narrow(dim, a, b - a)) for offset, part in parts for a, b in pairwise(ends)]
        return parts

    place = write_checkpoint(tmp_path_factory.mktemp("cut") / "run", {"x": tensor}, cut=cut, files=2)
    first = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, first, strict=True))
    box = Box(first, size)
    assert torch.equal(TorchDist(place).read_box("x", box), tensor[box.slices])


FORMS = ("stacked", "apart", "single")
KINDS = ("gpt", "gelu", "llama", "qwen", "mixtral", "deepseek")


@pytest.mark.parametrize(
    "jobs",
    [
        {1: ["gpt-stacked", "gelu-apart", "qwen-apart", "mixtral-stacked", "deepseek-single"], 2: ["llama-stacked"]},
        pytest.param({1: [f"{kind}-{form}" for kind in KINDS for form in FORMS]}, marks=pytest.mark.slow),
        pytest.param(
            {2: [f"{kind}-{form}" for kind in ("gpt", "llama", "mixtral") for form in FORMS]}, marks=pytest.mark.slow
        ),
    ],
    ids=["some", "alone-all", "tensor-parallel-all"],
)
def test_what_megatron_core_saved_gives_the_logits_megatron_core_gave(
    jobs: dict[int, list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    _save_by_megatron_core(tmp_path, jobs)
    for name in chain(*jobs.values()):
        theirs = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        import_megatron(f"megatron:{tmp_path / name}", tmp_path / "ours" / name, changes=["vocab_size=120"])
        with torch.no_grad():
            ours = load_model(str(tmp_path / "ours" / name), device="cpu").model(theirs["tokens"])
        expected = theirs["logits"][..., :120]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


def _save_by_megatron_core(place: Path, jobs: dict[int, list[str]]) -> None:
    """Have Megatron-core save these models, on as many ranks each."""
    script = Path(__file__).parents[1] / "mcore_models.py"
    words = [f"{ranks}:{','.join(names)}" for ranks, names in jobs.items()]
    done = subprocess.run(
        [sys.executable, str(script), str(place), *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    spec, weights = model_of("llama")
    state = megatron_state(spec, weights, stacked=True, padded=PADDED)
    write_checkpoint(tmp_path / "run", state, arguments=arguments_of(spec, PADDED))
    return tmp_path / "run"


def test_a_run_starts_from_an_imported_checkpoint(llama: Path, tmp_path: Path) -> None:
    import_megatron(f"megatron:{llama}", tmp_path / "ours", changes=["vocab_size=120"])
    spec = resolve(
        None,
        [f"init_from={tmp_path / 'ours'}", "data.train=corpus", "train={steps: 1, global_batch: 1}", "optim.lr=0.1"],
    ).spec
    assert (spec.model.kv_heads, spec.model.vocab_size, spec.model.tied) == (2, 120, False)


def test_a_run_does_not_start_from_megatrons_files_and_says_how(llama: Path) -> None:
    with pytest.raises(ArgosyError, match="cannot start from") as refused:
        resolve(
            None,
            [f"init_from=megatron:{llama}", "data.train=corpus", "train={steps: 1, global_batch: 1}", "optim.lr=0.1"],
        )
    assert "argosy ckpt import" in refused.value.fix


def test_without_arguments_the_model_is_described_by_hand_and_common_pt_not_opened(tmp_path: Path) -> None:
    spec, weights = model_of("llama")
    place = write_checkpoint(tmp_path / "run", megatron_state(spec, weights, stacked=False, padded=PADDED))
    with pytest.raises(ArgosyError, match="does not hold the arguments"):
        import_megatron(f"megatron:{place}", tmp_path / "ours")
    (place / "common.pt").write_bytes(b"whatever")
    changes = [f"{key}={value}" for key, value in MODELS["llama"].items() if key != "family"]
    import_megatron(f"megatron:{place}", tmp_path / "ours", model="llama2-7b", changes=changes)
    assert all(torch.equal(back, weights[name]) for name, back in imported(tmp_path / "ours").items())


def test_nemos_directories_and_names_are_found(tmp_path: Path) -> None:
    spec, weights = model_of("llama")
    state = megatron_state(spec, weights, stacked=True, padded=PADDED)
    place = write_checkpoint(tmp_path / "run", {f"module.{name}": tensor for name, tensor in state.items()})
    (tmp_path / "nemo").mkdir()
    place.rename(tmp_path / "nemo" / "weights")
    changes = [f"{key}={value}" for key, value in MODELS["llama"].items() if key != "family"]
    import_megatron(f"megatron:{tmp_path / 'nemo'}", tmp_path / "ours", model="llama2-7b", changes=changes)
    assert all(torch.equal(back, weights[name]) for name, back in imported(tmp_path / "ours").items())


def test_the_tokenizer_says_what_is_padding_and_lies_beside_the_weights(tmp_path: Path) -> None:
    spec, weights = model_of("llama")
    wide = {name: torch.cat([t, t, t])[:257] if t.shape[0] == 120 else t for name, t in weights.items()}
    arguments = arguments_of(spec, 384)
    write_checkpoint(tmp_path / "run", megatron_state(spec, wide, stacked=True, padded=384), arguments=arguments)
    found = import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "kept")
    assert "all kept" in found.describe(done=True)
    assert found.padding == 0
    found = import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours", tokenizer="bytes")
    assert found.padding == 384 - 257
    loaded = load_model(str(tmp_path / "ours"), device="cpu")
    assert (loaded.source.vocab_size, loaded.source.eod_id) == (257, 256)
    assert loaded.source.tokenizer() is not None


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    spec, weights = model_of("llama")
    state = megatron_state(spec, weights, stacked=True, padded=512)
    write_checkpoint(tmp_path / "run", state, arguments=arguments_of(spec, 512) | {"tensor_model_parallel_size": 1})
    with pytest.raises(ArgosyError, match=r"257 tokens and the model 512 rows.* multiple of 128 would have made 384"):
        import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours", tokenizer="bytes")


def _change_state(name: str, value: Tensor | None) -> Any:
    def change(state: dict[str, Tensor]) -> None:
        state.pop(name, None)
        if value is not None:
            state[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_change_state("decoder.layers.mlp.linear_fc2.weight", None), r"lacks decoder.layers.mlp.linear_fc2.weight"),
        (_change_state("decoder.layers.self_attention.linear_qkv.bias", torch.ones(3, 64)), "holds decoder.layers.self_att"),
        (_change_state("mtp.layers.0.eh_proj.weight", torch.ones(3)), "holds mtp.layers.0.eh_proj.weight"),
        (_change_state("decoder.final_layernorm.weight", torch.ones(31)), r"\[31\].*wants \[32\]"),
        (_change_state("decoder.final_layernorm.weight", torch.ones(32, dtype=torch.int64)), "int64"),
        (_change_state("embedding.word_embeddings.weight", torch.ones(100, 32)), r"\[100, 32\].*vocab_size = 128"),
        (_change_state("embedding.word_embeddings.weight", None), "holds 0 tensors embedding.word"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_named(change: Any, says: str, tmp_path: Path) -> None:
    spec, weights = model_of("llama")
    state = megatron_state(spec, weights, stacked=True, padded=PADDED)
    change(state)
    write_checkpoint(tmp_path / "run", state, cut=whole, arguments=arguments_of(spec, PADDED))
    with pytest.raises(ArgosyError, match=says) as refused:
        import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours")
    assert refused.value.code == "megatron.bad-files"
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ({"num_query_groups": 4}, "megatron.bad-files", r"\[3, 64, 32\].*\(heads 4 \+ 2 x kv_heads 4\) x head_dim 8 = 96"),
        ({"num_layers": 2}, "megatron.bad-files", r"layers = 2"),
        ({"ffn_hidden_size": 40}, "megatron.bad-files", r"2 x ffn 40 = 80"),
        ({"untie_embeddings_and_output_weights": False}, "megatron.bad-files", "holds output_layer.weight"),
        ({"multi_latent_attention": True}, "megatron.unsupported", "multi_latent_attention = True"),
        ({"apply_layernorm_1p": True}, "megatron.unsupported", "apply_layernorm_1p"),
        ({"position_embedding_type": "yarn"}, "megatron.unsupported", "'yarn'.*'learned_absolute' or 'rope'"),
        ({"hidden_size": None}, "megatron.unsupported", "hidden_size"),
        ({"position_embedding_type": None, "add_position_embedding": False}, "megatron.unsupported", "without position embeddings"),
        ({"num_query_groups": 3}, "config.bad-value", "multiple of kv_heads"),
    ],
)  # fmt: skip
def test_arguments_that_contradict_the_tensors_or_make_another_model_are_refused(
    arguments: dict[str, Any], code: str, says: str, tmp_path: Path
) -> None:
    spec, weights = model_of("llama")
    state = megatron_state(spec, weights, stacked=True, padded=PADDED)
    write_checkpoint(tmp_path / "run", state, arguments=arguments_of(spec, PADDED) | arguments)
    with pytest.raises(ArgosyError, match=says) as refused:
        import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours")
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "'zarr'"),
        (lambda d: (d / "mp_rank_00").mkdir(), "mp_rank"),
        (lambda d: None, "neither .metadata nor latest"),
        (lambda d: (d / "latest_checkpointed_iteration.txt").write_text("../../etc"), "neither .metadata"),
    ],
)
def test_other_formats_are_refused_by_their_name(make: Any, says: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ArgosyError, match=says):
        find_iteration(tmp_path)


def test_the_command_says_what_it_would_do_and_does_it(llama: Path, tmp_path: Path) -> None:
    command = ["ckpt", "import", f"megatron:{llama}", "--to", str(tmp_path / "ours")]
    said = CliRunner().invoke(app, [*command, "vocab_size=120", "--dry-run"])
    assert said.exit_code == 0, said.output
    assert "would import" in said.output
    assert "8 are padding" in said.output
    assert not (tmp_path / "ours").exists()
    done = CliRunner().invoke(app, [*command, "vocab_size=128", "--json"])
    assert json.loads(done.output)["padding"] == 0


def test_what_only_megatron_needs_is_refused_for_others(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["ckpt", "import", "hf:x", "--to", str(tmp_path / "y"), "--model", "gpt2"])
    assert said.exit_code != 0
    assert isinstance(said.exception, ArgosyError)
    assert said.exception.code == "config.conflict"


def test_one_layer_of_a_stack_is_read_without_the_others(tmp_path: Path) -> None:
    """Reading one layer of a stacked tensor reads only that layer's bytes."""
    stack = torch.randn(64, 32, 16)
    place = write_checkpoint(tmp_path / "run", {"x": stack}, cut=whole)
    assert torch.equal(TorchDist(place).read_box("x", Box((40, 0, 0), (1, 32, 16))), stack[40:41])
    assert halves("x", stack)[1][0] == (0, 0, 5)


def test_importing_takes_the_memory_of_a_few_parameters_not_of_the_model(tmp_path: Path) -> None:
    for name, layers in (("small", 4), ("large", 16)):
        sizes = {"layers": layers, "hidden": 768, "heads": 8, "ffn": 1536, "vocab_size": 1024, "max_seq_len": 64}
        spec = resolve_model({"family": "llama", **sizes})
        shapes = {name: p.shape for name, p in build_model(spec, "meta").named_parameters()}
        weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        state = megatron_state(spec, weights, stacked=True, padded=1024)
        write_checkpoint(tmp_path / name, state, arguments=arguments_of(spec, 1024))
    total = sum(w.nbytes for w in weights.values())
    largest = max(w.nbytes for w in weights.values())
    # What every import takes is no part of it.
    small, large = (
        peak_growth(lambda n=name: import_megatron(f"megatron:{tmp_path / n}", tmp_path / f"ours-{n}"))  # type: ignore[misc]
        for name in ("small", "large")
    )
    grown = large - small
    assert total > 40 * largest
    assert grown < total / 2, f"{grown:,} bytes more for {total:,} of weights, of which the largest has {largest:,}"


def test_a_full_disk_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    with full_beyond(20_000), pytest.raises(ArgosyError) as refused:
        import_megatron(f"megatron:{llama}", tmp_path / "ours")
    assert refused.value.code == "hf.write-failed"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

"""`argosy bench` runs every family; its numbers agree with each other, and the floor is below the step time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from argosy.train.kernel_profile import kind_of, write_trace

Argosy = Callable[..., "CompletedProcess[str]"]
TINY = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.head_dim=16", "model.ffn=64"]
TINY += ["model.vocab_size=128", "--seq-len", "32", "--batch", "4", "--steps", "2", "--warmup", "1"]


@pytest.mark.parametrize("model", ["llama3-1b", "bert-base", "t5-small", "moe-3.5b-a1.1b"])
def test_a_benchmark_of_each_family(argosy: Argosy, model: str) -> None:
    more = ["model.moe.ffn=32"] if model.startswith("moe") else []
    done = argosy("bench", model, *TINY, *more, "--micro-batch", 2, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Tokens in a sample. T5 also reads its targets.
    read = 32 + (8 if model == "t5-small" else 0)
    assert found["tokens_per_s"] == pytest.approx(4 * read / found["step_ms"] * 1000)
    assert len(found["steps_ms"]) == 2
    assert found["floor_ms"] == pytest.approx(found["kinds_ms"]["gemm"] + found["kinds_ms"]["attention"])
    assert found["attention"] == "torch"
    assert 0 < found["floor_ms"] < found["floor_ms"] + found["kinds_ms"]["other"]
    # No dense peak is known for a CPU.
    assert found["mfu"] is None
    memory = found["memory_gib"]
    assert memory["peak"] >= memory["parameters"] + memory["gradients"] + memory["optimiser"]


@pytest.mark.parametrize("length", [["data.seq_len=512"], ["model.max_seq_len=512"]])
def test_a_step_has_as_many_tokens_however_a_sample_got_its_length(argosy: Argosy, length: list[str]) -> None:
    sizes = [key for key in TINY if key.startswith("model.")] + ["model.layers=1"]
    done = argosy("bench", "qwen3-8b", *sizes, *length, "--steps", 1, "--warmup", 1, "--micro-batch", 8, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["seq_len"], found["batch"]) == (512, 32)


def test_the_table_and_the_trace(argosy: Argosy, tmp_path: Path) -> None:
    done = argosy("bench", "gpt2", *TINY, "train.precision=bf16", "--trace", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    for word in ("bf16", "tokens/s", "n/a", "floor", "the host waited 0 times"):
        assert word in done.stdout
    assert "profiler_start" not in done.stderr
    assert "argosy step" in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["gpt2", "data.train=corpus"], "data.train"),
        (["gpt2", "data.document_mask=true"], "data.document_mask"),
        (["gpt2", "train.tokens=1M"], "train.tokens"),
        (["gpt2", "checkpoint.keep=1"], "checkpoint.keep"),
        (["gpt2", "--batch", "2", "train.global_batch=4"], "train.global_batch"),
        (["gpt2", "--seq-len", "64", "data.seq_len=32"], "data.seq_len"),
        (["gpt2", "-o", "found.json"], "--output"),
        (["gpt2", "--calibrate"], "--calibrate"),
        (["--calibrate", "--batch", "4"], "--calibrate"),
        (["gpt2", "--rank", "1"], "--rank"),
        (["gpt2", "--cluster", "8xH100"], "--cluster"),
    ],
)
def test_what_a_benchmark_would_not_use_is_refused(argosy: Argosy, arguments: list[str], key: str) -> None:
    done = argosy("bench", *arguments, "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["key"]) == ("config.conflict", key)


def test_a_misspelt_key_of_a_benchmark_is_told_from_one_it_would_not_use(argosy: Argosy) -> None:
    done = argosy("bench", "gpt2", "train.precison=bf16")
    assert done.returncode == 2
    assert "did you mean train.precision?" in done.stderr


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_timed(argosy: Argosy, tmp_path: Path) -> None:
    done = argosy("bench", "gpt2", *TINY, "--trace", tmp_path / "nowhere" / "trace.json")
    assert done.returncode == 2
    assert "error[io.failed]" in done.stderr
    assert done.stdout == ""


def test_a_trace_that_was_cut_short_is_no_trace(tmp_path: Path) -> None:
    class Full:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": [{"name": "aten::mm"')

    with pytest.raises(OSError, match="to its end"):
        write_trace(Full(), tmp_path / "trace.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_33", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
        ("triton_tem_fused_flex_attention_backward_0", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "other"),
        ("_backward", "other"),
    ],
)
def test_kernels_are_told_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind

"""Published measurements are read even if they omit values, and predicted within the promised error."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest
from benchmarks.planner import accuracy, machines, own, rows

from argosy.plan.advise import work_of
from argosy.plan.calibration import calibration

MEASUREMENTS = Path(rows.__file__).parent


def test_published_rows_are_predicted_as_well_as_is_promised() -> None:
    read, refused = rows.read_rows(MEASUREMENTS / "published.csv")
    assert len(read) == 672
    assert not refused
    known, timed = calibration(), accuracy.timed(read)

    def error(chosen: list[object]) -> float:
        return mean(accuracy.errors(chosen, known))

    assert error([row for row in timed if row.dense and row.sixteen_bit]) < 0.10
    assert error([row for row in timed if not (row.dense and row.sixteen_bit)]) < 0.18
    assert error([row for row in timed if row.source == "vtrain"]) < 0.145
    assert error([row for row in timed if row.source == "vtrain1n"]) < 0.084
    wrong = [row.id for row in read if not accuracy.fits(row, known) and not row.out_of_memory]
    assert len(wrong) <= 2


def test_our_own_engine_is_predicted_within_eight_per_cent_and_its_memory_within_five() -> None:
    read, refused = rows.read_rows(MEASUREMENTS / "own.csv")
    assert len(read) >= 32
    assert not refused
    known = calibration()
    for row in read:
        assert accuracy.seconds(row, known) == pytest.approx(row.step_s, rel=0.08), row.id
        assert accuracy.gibibytes(row, known) == pytest.approx(row.memory, rel=0.05), row.id


def test_our_own_rows_are_timed_again_with_runs_of_their_shape() -> None:
    read, _ = rows.read_rows(own.OWN)
    with own.OWN.open(newline="") as file:
        cells = list(csv.DictReader(file))
    for row, given in zip(read, cells, strict=True):
        spec = own.spec_of(given)
        work = work_of(spec)
        assert (work.seq_len, work.global_batch, work.precision) == (
            row.work.seq_len,
            row.work.global_batch,
            row.work.precision,
        )
        # A row says nothing of the layers' parts.
        assert work.sizes.hidden == row.work.sizes.hidden
        assert work.sizes.layers == row.work.sizes.layers
        assert spec.parallel.recompute == row.layout.recompute
        assert spec.parallel.micro_batch == row.layout.micro_batch
        assert (spec.parallel.graph == "off") == (not row.stack.replays)


def test_rows_the_constants_never_saw_are_predicted_nearly_as_well() -> None:
    read, refused = rows.read_rows(MEASUREMENTS / "peers.csv")
    assert len(read) == 520
    assert not refused
    timed = accuracy.timed(read)
    dense = [row for row in timed if row.dense and row.sixteen_bit]
    assert mean(accuracy.errors(dense, calibration())) < 0.10
    assert mean(accuracy.errors([row for row in timed if row not in dense], calibration())) < 0.15
    wrong = [row.id for row in read if not accuracy.fits(row, calibration()) and not row.out_of_memory]
    assert len(wrong) <= 4


@pytest.mark.parametrize("column", ["measured_tflops_gpu", "measured_mfu"])
@pytest.mark.parametrize("source", ["foundry", "sc21", "mlm-2020", "korth", "mlm-fp8", "bridge"])
def test_flops_say_the_time_in_the_convention_they_are_counted_in(source: str, column: str) -> None:
    with (MEASUREMENTS / "published.csv").open(newline="") as file:
        told = [row for row in csv.DictReader(file) if row["id"].startswith(f"{source}-") and row[column]]
    told = [row for row in told if row["measured_step_s"] and "gpt-oss" not in row["model"]][:20]
    other = {"measured_step_s": "", "measured_tok_s_gpu": "", "measured_tflops_gpu": "", "measured_mfu": ""}
    derived, refused = rows.rows_of({**row, **other, column: row[column]} for row in told)
    assert not refused
    for row, said in zip(derived, told, strict=True):
        assert row.step_s == pytest.approx(float(said["measured_step_s"]), rel=0.04), row.id


def write(path: Path, **cells: object) -> Path:
    with (MEASUREMENTS / "published.csv").open() as file:
        columns = next(csv.reader(file))
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000, "seq_len": 2048, "global_batch": 512}
    row = {"id": "new-001", "source": "somewhere", "model": "a model", "measured_tok_s_gpu": 3000, **shape, **cells}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerow(row)
    return path


@pytest.mark.parametrize(
    ("cells", "gpu", "stack", "attention"),
    [
        ({"gpu": "V100-SXM2-32GB", "gpus": 64}, "V100-32", "megatron-2021", "unfused"),
        ({"gpu": "A100-SXM4-40GB", "gpus": 16}, "A100-40", "megatron-2022", "unfused"),
        ({"gpu": "A100", "gpus": 64, "attn_impl": "flash2"}, "A100-80", "torch", "flash"),
        ({"gpu": "A100", "gpus": 384, "source": "Megatron-DeepSpeed"}, "A100-80", "megatron-deepspeed", "unfused"),
        ({"gpu": "NVIDIA H100 PCIe", "gpus": 8}, "H100-PCIe", "megatron", "native"),
        ({"gpu": "H200", "gpus": 64, "zero_stage": 3, "attn_impl": "flash2"}, "H200", "fsdp", "flash"),
        ({"gpu": "B200", "gpus": 64, "precision": "mxfp8"}, "B200", "megatron", "native"),
        ({"gpu": "H100", "gpus": 64, "source": "NeMo 25.02"}, "H100", "nemo", "native"),
        (
            {"gpu": "A100", "gpus": 64, "source": "GPT-NeoX", "attn_impl": "flash"},
            "A100-80",
            "megatron-deepspeed",
            "flash",
        ),
        ({"gpu": "H100", "gpus": 64, "notes": "FSDP2 x TP", "tp": 4, "zero_stage": 3}, "H100", "fsdp", "native"),
    ],
)
def test_what_a_row_leaves_out_is_filled_sensibly(
    tmp_path: Path,
    cells: dict[str, object],
    gpu: str,
    stack: str,
    attention: str,
) -> None:
    [row], refused = rows.read_rows(write(tmp_path / "rows.csv", **cells))
    assert not refused
    assert (row.cluster.gpu.name, row.stack.name, row.stack.attention) == (gpu, stack, attention)
    assert row.layout.gpus == cells["gpus"]
    assert row.work.precision == ("fp8" if "precision" in cells else "bf16")
    # The published run did not run out of memory.
    assert accuracy.fits(row, calibration())
    assert accuracy.seconds(row, calibration()) > 0
    assert "micro_batch" in row.filled
    assert "recompute" in row.filled


def test_micro_batches_are_as_large_as_fits_without_recompute_where_a_row_says_neither(
    tmp_path: Path,
) -> None:
    whole = {"gpu": "H100", "gpus": 8, "dp": 8, "seq_len": 4096, "global_batch": 128}
    [row], _ = rows.read_rows(write(tmp_path / "rows.csv", **whole))
    assert row.recomputed == 0
    [made_again], _ = rows.read_rows(write(tmp_path / "full.csv", recompute="full", **whole))
    assert made_again.layout.micro_batch > row.layout.micro_batch


@pytest.mark.parametrize(
    ("release", "experts", "stack"), [("26.04", 8, "nemo"), ("26.08", 8, "nemo-2026"), ("26.08", "", "nemo")]
)
def test_later_recipes_hide_what_tokens_wait_for(tmp_path: Path, release: str, experts: object, stack: str) -> None:
    source, shape = f"Megatron-Bridge {release}", {"moe_experts": experts, "moe_topk": 2, "gated_mlp": 1}
    [row], _ = rows.read_rows(
        write(tmp_path / "rows.csv", gpu="GB200", gpus=64, source=source, ffn_hidden=4096, **shape)
    )
    assert row.stack.name == stack


def test_a_pipelines_micro_batch_is_one_sequence_unless_more_are_much_faster(tmp_path: Path) -> None:
    layout = {"gpu": "A100", "gpus": 64, "tp": 8, "pp": 8, "recompute": "full"}
    [large], _ = rows.read_rows(write(tmp_path / "large.csv", **layout, layers=80, hidden=12288, heads=96))
    [small], _ = rows.read_rows(write(tmp_path / "small.csv", **layout, layers=16, hidden=1024, heads=16, seq_len=512))
    assert large.layout.micro_batch == 1
    # With one sequence the step would be launch-bound.
    assert small.layout.micro_batch > 1


def test_a_model_compiled_whole_has_its_loss_fused(tmp_path: Path) -> None:
    cells = {"gpu": "A100", "gpus": 8, "source": "nanoGPT", "zero_stage": 0, "micro_batch": 1, "recompute": "none"}
    [eager], _ = rows.read_rows(write(tmp_path / "eager.csv", **cells))
    [compiled], _ = rows.read_rows(write(tmp_path / "compiled.csv", notes="torch.compile", **cells))
    assert (eager.stack.fused, compiled.stack.fused) == (False, True)
    assert compiled.stack.loss < eager.stack.loss


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    read, [(name, why)] = rows.read_rows(write(tmp_path / "rows.csv", gpu="a GPU nobody knows", gpus=8))
    assert (read, name) == ([], "new-001")
    assert "no GPU named" in why


@pytest.mark.parametrize("column", ["gpus", "tp", "pp", "cp", "dp", "seq_len", "global_batch", "gpus_per_node"])
def test_what_the_rest_of_a_row_settles_is_not_guessed(tmp_path: Path, column: str) -> None:
    whole = {
        "gpu": "A100", "gpus": 64, "gpus_per_node": 8, "tp": 8, "pp": 4, "cp": 1, "dp": 2, "seq_len": 2048, "global_batch": 512,
        "micro_batch": 1, "recompute": "full", "measured_step_s": 5.4613, "measured_tok_s_gpu": 3000,
    }  # fmt: skip
    [told], _ = rows.read_rows(write(tmp_path / "whole.csv", **whole))
    [found], _ = rows.read_rows(write(tmp_path / "gap.csv", **{**whole, column: ""}))
    assert (found.layout, found.cluster, found.step_s) == (told.layout, told.cluster, told.step_s)
    assert (found.work.seq_len, found.work.global_batch) == (2048, 512)


def test_so_many_gpus_as_the_pace_needs_where_a_row_does_not_say(
    tmp_path: Path,
) -> None:
    told = {"gpu": "H100", "gpus_per_node": 8, "tp": 8, "pp": 1, "cp": 1, "micro_batch": 1, "recompute": "full"}
    [known], _ = rows.read_rows(write(tmp_path / "known.csv", gpus=64, dp=8, **told))
    took = accuracy.seconds(known, calibration())
    [found], _ = rows.read_rows(
        write(tmp_path / "gap.csv", measured_step_s=took, **(told | {"measured_tok_s_gpu": ""}))
    )
    assert (found.layout, found.cluster.gpus) == (known.layout, 64)
    # The layout was found by its step time, so the row cannot test the prediction of time.
    assert not accuracy.timed([found])


def test_a_known_name_gives_the_shape(tmp_path: Path) -> None:
    gaps = {"layers": "", "hidden": "", "heads": "", "vocab": ""}
    [row], _ = rows.read_rows(write(tmp_path / "rows.csv", gpu="H100", gpus=8, model="llama3-8b", **gaps))
    model = row.work.model
    assert (model.layers, model.hidden, model.kv_heads, model.ffn, model.vocab_size) == (32, 4096, 8, 14336, 128256)
    read, [(_, why)] = rows.read_rows(write(tmp_path / "rows.csv", gpu="H100", gpus=8, model="a secret", **gaps))
    assert not read
    assert "neither layers and hidden nor a known model" in why


def test_other_spellings_mean_the_same(tmp_path: Path) -> None:
    plain = {"gpu": "H100", "gpus": 8, "tp": 8, "sequence_parallel": 1, "recompute": "full", "micro_batch": ""}
    other = {
        "gpus": " 8.0",
        "tp": "8x",
        "sequence_parallel": "True",
        "recompute": "uniform",
        "micro_batch": "auto",
        "hidden": "4,096",
    }
    [told], _ = rows.read_rows(write(tmp_path / "plain.csv", **plain))
    [meant], _ = rows.read_rows(write(tmp_path / "other.csv", **{**plain, **other}))
    assert (meant.layout, meant.filled) == (told.layout, told.filled)


@pytest.mark.parametrize(
    "cells",
    [
        {"seq_len": "8K"}, {"global_batch": "4M tokens"}, {"global_batch": 4194304}, {"measured_tok_s_gpu": "9k"}, {"gpus": "8 x 8"},
        {"measured_tok_s_gpu": "", "measured_step_s": "7281.8 ms"}, {"model": "meta-llama/Meta-Llama-3.1-8B-Instruct"},
        {"model": "Llama 3 8B"}, {"attn_impl": "FlashAttention-3"}, {"attn_impl": "FA3"}, {"precision": "BF16-mixed"},
    ],
)  # fmt: skip
def test_units_and_names_are_read_as_people_write_them(tmp_path: Path, cells: dict[str, object]) -> None:
    shape = {"layers": "", "hidden": "", "heads": "", "vocab": "", "seq_len": 8192, "global_batch": 512}
    plain = {"gpu": "H100", "gpus": 64, "model": "llama3-8b", "measured_tok_s_gpu": 9000, **shape}
    [told], _ = rows.read_rows(write(tmp_path / "plain.csv", **plain))
    [meant], _ = rows.read_rows(write(tmp_path / "other.csv", **{**plain, **cells}))
    assert (meant.work.model, meant.layout, meant.cluster.gpus) == (told.work.model, told.layout, 64)
    assert (meant.work.seq_len, meant.work.global_batch) == (8192, 512)
    assert meant.step_s == pytest.approx(told.step_s, rel=1e-3)


@pytest.mark.parametrize(
    ("said", "kernels"),
    [
        ("FlashAttention-2", "flash"),
        ("SDPA", "flash"),
        ("xformers", "flash"),
        ("TE", "native"),
        ("eager attention", "unfused"),
    ],
)
def test_attention_is_known_by_the_words_people_write(tmp_path: Path, said: str, kernels: str) -> None:
    [row], _ = rows.read_rows(write(tmp_path / "rows.csv", gpu="H100", gpus=8, attn_impl=said))
    assert row.stack.attention == kernels


def test_a_known_mixture_has_its_experts(tmp_path: Path) -> None:
    gaps = {"layers": "", "hidden": "", "heads": "", "vocab": "", "model": "Mixtral 8x7B"}
    [row], _ = rows.read_rows(write(tmp_path / "rows.csv", gpu="H100", gpus=64, **gaps))
    assert (row.work.model.moe.experts, row.work.model.moe.top_k) == (8, 2)


def test_products_in_32_bits_are_listed_as_unreadable(tmp_path: Path) -> None:
    read, [(_, why)] = rows.read_rows(write(tmp_path / "rows.csv", gpu="V100", gpus=8, precision="fp32"))
    assert not read
    assert "fp32" in why


def test_columns_in_any_order_case_and_company(tmp_path: Path) -> None:
    [told], _ = rows.read_rows(write(tmp_path / "plain.csv", gpu="H100", gpus=8, tp=8))
    with (tmp_path / "plain.csv").open() as file:
        [cells] = csv.DictReader(file)
    with (tmp_path / "other.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, [*(name.upper() for name in reversed(cells)), "weather"], lineterminator="\r\n")
        writer.writeheader()
        writer.writerow({**{name.upper(): text for name, text in cells.items()}, "weather": "fair"})
    [meant], _ = rows.read_rows(tmp_path / "other.csv")
    assert (meant.layout, meant.work.model, meant.cluster) == (told.layout, told.work.model, told.cluster)


def test_so_many_parameters_give_a_shape(tmp_path: Path) -> None:
    gaps = {"layers": "", "hidden": "", "heads": "", "model": "gpt-175b"}
    [row], _ = rows.read_rows(write(tmp_path / "rows.csv", gpu="A100", gpus=512, tp=8, pp=8, **gaps))
    assert (row.work.model.layers, row.work.model.hidden) == (96, 12288)


@pytest.mark.parametrize(
    ("said", "gpu"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"), ("8xH100", "H100"), ("H100 NVL", "H100-NVL"), ("H100-SXM5 (NVLink)", "H100"),
        ("GH200 480GB", "GH200"), ("GB200 NVL72", "GB200"), ("RTX 4090", "RTX-4090"), ("L40S", "L40S"), ("V100S", "V100-32"),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_words_people_write(said: str, gpu: str) -> None:
    assert machines.gpu_of({"gpu": said}).name == gpu


def test_notes_say_what_has_no_column(tmp_path: Path) -> None:
    said = "MLA q_lora1536 kv_lora512; 3 dense layers ffn18432 + 1 shared expert; w/ MTP; expert-tensor-parallel-size=1; DualPipe"
    shape = {"model": "deepseek-v3", "layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128, "ffn_hidden": 2048}
    experts = {"moe_experts": 256, "moe_topk": 8, "tp": 2, "pp": 8, "ep": 64, "gated_mlp": 1}
    [row], _ = rows.read_rows(write(tmp_path / "rows.csv", gpu="H800", gpus=2048, notes=said, **shape, **experts))
    assert row.work.latent is not None
    assert row.work.sizes.layers == 62
    moe = row.work.model.moe
    assert (moe.dense_layers, moe.shared_experts, row.work.model.ffn) == (3, 1, 18432)
    assert (row.layout.expert_tp, row.layout.schedule) == (1, "dualpipev")
    assert "experts" in row.stack.overlaps

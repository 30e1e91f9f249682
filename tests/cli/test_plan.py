"""`argosy plan` on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forking


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forking.run(["plan", *arguments])


def test_the_ranked_table_with_days_and_dollars() -> None:
    asked = (
        "llama2-7b",
        "--cluster",
        "2xp4d.24xlarge",
        "--global-batch",
        "512",
        "--seq-len",
        "4096",
        "--tokens",
        "20B",
    )
    done = plan(*asked, "--explain")
    assert done.returncode == 0, done.stderr
    for part in ("tok/s/GPU", "MFU", "days", "why the others lost", "checkpoint", "parallel: {", "products"):
        assert part in done.stdout
    [first, *_] = json.loads(plan(*asked, "--json").stdout)["plans"]
    assert first["fits"]
    assert first["days"] > 0
    assert first["dollars"] == pytest.approx(first["days"] * 24 * 43.92, rel=1e-3)


def test_a_run_spec_is_compared_with_the_best(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: gpt2-large\ndata: {train: synthetic, seq_len: 1024}\ntrain: {global_batch: 64, steps: 100}\n"
        "optim: {lr: 1e-4}\n"
    )
    done = plan(str(run), "--cluster", "1xH200")
    assert done.returncode == 0, done.stderr
    [_, own] = done.stdout.split("the run spec's own layout")
    assert "tok/s/GPU" in own, "its memory and time, as for the planner's own choice"
    assert "100 steps" in done.stdout


def test_a_length_that_is_not_given_is_20_tokens_a_parameter_and_says_so() -> None:
    done = plan("gpt2", "--cluster", "1xH100")
    assert "2,488,796,160 tokens (Chinchilla's 20 a parameter" in done.stdout
    assert "±" in done.stdout
    assert "layout: keys of `parallel`" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("parallel.micro_batch=")


def test_one_line_answers_whether_it_fits_how_long_and_how_much() -> None:
    asked = ("llama2-7b", "--cluster", "16xH100")
    [best, *_] = json.loads(plan(*asked, "--json").stdout)["plans"]
    [line] = [line for line in plan(*asked).stdout.splitlines() if line.startswith("answer")]
    assert re.search(r"fits \([\d.]+ of 79.1 GiB\), [\d.]+ ±[\d.]+ days, \$[\d,]+ ±[\d,]+, with ", line)
    assert line.endswith(best["notation"])
    # GPUs without an instance type cost what the cheapest instance with them costs.
    assert best["dollars"] == pytest.approx(best["days"] * 24 * 16 * 6.88, rel=1e-3)


def test_the_names_of_clusters_are_listed() -> None:
    listed = forking.run(["config", "clusters"]).stdout
    assert re.search(r"^p4d\.24xlarge +8 x A100-40 .* 21\.96$", listed, re.M)
    assert re.search(r"^H100 +79\.1 .* 6\.88$", listed, re.M)


def test_clusters_are_compared_and_the_cheapest_in_time_is_named() -> None:
    asked = (
        "llama2-7b",
        "--cluster",
        "p4d.24xlarge",
        "--cluster",
        "1xp5.48xlarge",
        "--cluster",
        "1xA10G",
        "--tokens",
        "20B",
    )
    found = json.loads(plan(*asked, "--within", "4", "--json").stdout)
    days = {name: one["plans"][0]["days"] for name, one in found["clusters"].items()}
    dollars = {name: one["plans"][0]["dollars"] for name, one in found["clusters"].items()}
    assert list(days) == ["1xp4d.24xlarge", "2xp4d.24xlarge", "1xp5.48xlarge"], "as few nodes as are in time"
    timely = [name for name in days if days[name] <= 4]
    assert timely == ["2xp4d.24xlarge", "1xp5.48xlarge"]
    assert found["cheapest"] == min(timely, key=dollars.__getitem__)
    assert "1xA10G" in found["refused"]
    text = plan(*asked, "--within", "4", "--spot", "0.5").stdout
    assert f"cheapest within 4 days: {found['cheapest']}" in text
    assert f"${dollars[found['cheapest']] / 2:,.0f} ±10%" in text


def test_a_layout_is_held_by_the_keys_of_the_run_spec() -> None:
    asked = (
        "llama2-7b",
        "--cluster",
        "8xH100",
        "--global-batch",
        "64",
        "--what-if",
        "dp_replicate=2,dp_shard=4",
        "--json",
    )
    [first, *_] = json.loads(plan(*asked).stdout)["plans"]
    assert first["parallel"].items() >= {"dp_replicate": 2, "dp_shard": 4}.items()


def test_a_run_spec_is_planned_on_its_own_cluster(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: llama2-7b\ndata: {train: synthetic, seq_len: 4096}\ntrain: {global_batch: 64, steps: 100}\noptim: {lr: 1e-4}\n"
        "cluster: {cloud: eks, target: jobset, instance: p4d.24xlarge, nodes: 2, image: a/b:c}\n"
    )
    out = json.loads(plan(str(run), "--json").stdout)
    assert (out["cluster"], out["gpus"]) == ("2xp4d.24xlarge", 16)


def test_another_schedule_can_be_asked_for() -> None:
    asked = ("llama2-7b", "--cluster", "8xH100", "--global-batch", "64", "--what-if", "pp=4,schedule=zbv", "--json")
    [first, *_] = json.loads(plan(*asked).stdout)["plans"]
    assert (first["layout"]["schedule"], first["layout"]["vpp"]) == ("zbv", 2)
    assert first["bubble"] < 0.1


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    asked = ("llama2-7b", "--cluster", "8xH100", "--global-batch", "64", "--plot")
    assert plan(*asked, str(tmp_path / "plan.png")).returncode == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in plan(*asked, str(tmp_path / "no" / "plan.png")).stderr


def test_what_if() -> None:
    out = json.loads(
        plan("llama2-7b", "--cluster", "8xH100", "--global-batch", "64", "--what-if", "tp=4", "--json").stdout
    )
    assert {p["layout"]["tp"] for p in out["plans"]} == {4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama2-7b", "--cluster", "2xp4d.24xlrge"], "did you mean p4d.24xlarge"),
        (["llama2-7b", "--cluster", "16xH900"], "did you mean H800 or H200"),
        (["gpt3-175b", "--cluster", "8xA10G"], "least memory"),
        (["llama2-7b", "--cluster", "8xH100", "--what-if", "micro_batc=4"], "did you mean micro_batch"),
        (["llama2-7b", "--cluster", "8xH100", "--what-if", "tp=3"], "tp 3"),
        (["llama2-7b", "--cluster", "8xH100", "--what-if", "tp=0"], "a whole number above 0"),
        (["llama2-7b", "--cluster", "8xH100", "--what-if", "dp_shard=²"], "a whole number above 0"),
        (["llama2-7b", "--cluster", "8xH100", "--tokens", "many"], "--tokens"),
        (["llama2-7b", "--precision", "int4"], "not a training precision"),
        (["no-such-model"], "no-such-model"),
        (["llama2-7b", "--cluster", "8xA100-80", "--precision", "fp8"], "A100-80 has no fp8 matmuls, only bf16"),
        (["llama2-7b", "--cluster", "8xH100", "--what-if", "schedule=zvb"], "schedule is one of"),
        (["llama2-7b", "--cluster", "8xH100", "--what-if", "schedule=zbv,pp=1"], "pp is 1"),
        (["llama3-70b", "--cluster", "1xH100"], "about 17 or more such GPUs"),
    ],
)
def test_refusals_say_what_to_change(arguments: list[str], said: str) -> None:
    done = plan(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from argosy.plan.advise import Question, answer;"
        "q = Question.read('llama2-7b', [], cluster='8xH100', global_batch=64, seq_len=None, tokens=None, precision=None,"
        " what_if=None, price=None, hardware=None); answer(q); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The command line starts quickly, has truthful exit codes, and refuses readably."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from argosy import __version__
from argosy.cli.app import GROUPS, app
from forking import ARGOSY, Popen
from waiting import PATIENCE_S

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[..., Path]


def modules_after(code: str, cwd: Path) -> set[str]:
    """Return the modules imported after running some code in a fresh interpreter."""
    script = f"import sys\nsys.argv = {code!r}.split()\nfrom argosy.cli.app import main\ntry: main()\nexcept SystemExit: pass\nprint('MODULES', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True).stdout
    return set(out.rpartition("MODULES ")[2].split())


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    assert not {"torch", "numpy", "pydantic", "tokenizers", "yaml", "transformers"} & modules_after(
        "argosy --help", tmp_path
    )


@pytest.mark.parametrize("verb", ["config show", "config show run.yaml", "config models", "config schema"])
def test_config_never_imports_torch(verb: str, write_spec: Write, tmp_path: Path) -> None:
    write_spec()
    assert not {"torch", "numpy", "transformers"} & modules_after(f"argosy {verb}", tmp_path)


def test_preparing_a_little_text_imports_neither_torch_nor_a_second_engine(tmp_path: Path) -> None:
    from argosy.data.text.tokenizer import train_bpe

    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "t.json").write_text(train_bpe(["x"], 300))
    verb = "argosy data prepare a.jsonl --tokenizer t.json --output out"
    assert not {"torch", "fastokens", "pyarrow", "fsspec", "rich"} & modules_after(verb, tmp_path)
    assert (tmp_path / "out" / "manifest.json").exists()


def test_every_verb_explains_itself(argosy: Run) -> None:
    for verb in (
        "",
        "demo",
        "train",
        "sample",
        "eval",
        "data",
        "data prepare",
        "data train-tokenizer",
        "config",
        "config show",
    ):
        result = argosy(*verb.split(), "--help")
        assert result.returncode == 0, result.stderr
        assert "Usage: " in result.stdout
    assert argosy("--version").stdout.strip() == f"argosy {__version__}"


def test_help_lists_every_verb_in_a_group_with_a_summary_on_one_line(argosy: Run) -> None:
    for verb in ("", "data", "ckpt", "config"):
        text = argosy(*verb.split(), "--help", env={**os.environ, "COLUMNS": "80"}).stdout
        assert "..." not in text.replace("[ARGS]...", "")
        assert max(map(len, text.splitlines())) <= 80
    listed = {name for verbs in GROUPS.values() for name in verbs}
    assert listed == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_a_shell_completes_verbs(argosy: Run) -> None:
    asked = {**os.environ, "_ARGOSY_COMPLETE": "complete_bash", "COMP_WORDS": "argosy tr", "COMP_CWORD": "1"}
    assert argosy(env=asked).stdout.split() == ["train"]


def test_a_refusal_is_a_short_block_and_exit_code_2(argosy: Run, write_spec: Write) -> None:
    result = argosy("train", write_spec(), "optim.lrr=3")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "error[config.unknown-key]" in result.stderr
    assert "did you mean optim.lr?" in result.stderr
    assert len(result.stderr.splitlines()) < 8
    assert "Traceback" in argosy("--debug", "train", write_spec(), "optim.lrr=3").stderr


def test_a_refusal_with_json_is_an_object(argosy: Run, write_spec: Write) -> None:
    result = argosy("config", "show", write_spec(), "optim.lrr=3", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["code"] == "config.unknown-key"


def test_wrong_usage_is_exit_code_2(argosy: Run) -> None:
    assert argosy("trane").returncode == 2
    assert argosy("train", "--fersh").returncode == 2
    # There is no run.yaml in this directory.
    assert argosy("train").returncode == 2
    assert argosy("train", "missing.yaml").returncode == 2


def test_config_show_gives_values_and_origins(argosy: Run, write_spec: Write) -> None:
    path = write_spec()
    text = argosy("config", "show", path, "optim.eps=1e-9").stdout
    assert any(line.split() == ["optim.eps", "1e-09", "command", "line"] for line in text.splitlines())
    document = json.loads(argosy("config", "show", path, "--json").stdout)
    assert document["values"]["optim.lr"] == {"value": 0.001, "origin": f"run.yaml:{_line_of(path, 'lr:')}"}
    assert document["facts"]["parameters"] > 0


def test_config_show_without_a_run_spec_gives_the_defaults(argosy: Run) -> None:
    result = argosy("config", "show")
    assert result.returncode == 0
    assert "optim.weight_decay" in result.stdout


def test_the_models_are_listed_with_their_true_sizes(argosy: Run) -> None:
    text = argosy("config", "models").stdout
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "65 M" in rows["gpt3-375m"]
    assert "356 M" in rows["gpt3-857m"]
    models = json.loads(argosy("config", "models", "--json").stdout)["models"]
    assert next(m for m in models if m["name"] == "gpt2")["parameters"] == 124_439_808


def test_the_whole_journey(argosy: Run, write_spec: Write, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for i in range(30):
        (tmp_path / "docs" / f"{i}.txt").write_text(f"number {i} of some small files. " * 20)
    trained = argosy("data", "train-tokenizer", "docs", "--vocab-size", 300, "--output", "tokenizer.json")
    assert trained.returncode == 0, trained.stderr
    prepared = argosy("data", "prepare", "docs", "--tokenizer", "tokenizer.json", "--output", "corpus")
    assert prepared.returncode == 0, prepared.stderr
    assert "30 in = 30 out + 0 quarantined" in prepared.stdout
    model = {"family": "gpt", "layers": 1, "hidden": 32, "heads": 2, "vocab_size": 300}
    spec = write_spec(
        data={"train": "corpus", "seq_len": 16}, model=model, runs_dir="runs", eval={"every": 3, "batches": 1}
    )
    train = argosy("train", spec, "data.split=[90,10,0]")
    assert train.returncode == 0, train.stderr
    assert "step 6/6 | loss " in train.stdout
    *_, took, _, _, _, export = train.stdout.splitlines()
    assert took.startswith("done in ")
    assert "best validation loss" in took
    assert export.split() == ["argosy", "ckpt", "export", "runs/tiny", "--to", "tiny-hf"]
    assert "done: step 6/6" in argosy("status", "runs/tiny").stdout
    evaluation = json.loads(argosy("eval", "runs/tiny", "--json").stdout)
    assert (evaluation["step"], evaluation["split"]) == (6, "validation")
    assert argosy("sample", "runs/tiny", "--prompt", "number", "--tokens", 5).stdout.startswith("number")


def test_prepare_can_be_tried_without_writing(argosy: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    result = argosy("data", "prepare", "a.jsonl", "--tokenizer", "bytes", "--output", "out", "--dry-run")
    assert result.returncode == 0
    assert "1 files, 14 bytes" in result.stdout
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_early_is_not_a_bug(tmp_path: Path) -> None:
    """Run a command whose reader closes the pipe before the command writes, as `| head` does with long output."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "argosy", "config", "schema"], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert process.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in process.stderr


def test_training_goes_on_when_its_reader_leaves(write_spec: Write, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = Popen([*ARGOSY, "train", str(write_spec())], stdout=write_end, cwd=tmp_path)
    os.close(write_end)
    process.wait(PATIENCE_S)
    assert process.returncode == 0
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000006").exists()


def test_operating_system_errors_are_refusals(argosy: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to learn from")
    result = argosy("data", "train-tokenizer", "a.txt", "--vocab-size", 300, "--output", tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def _line_of(path: Path, start: str) -> int:
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(start))


def test_ranks_that_cannot_share_the_batch_are_refused_before_any_is_started(argosy: Run, write_spec: Write) -> None:
    result = argosy("train", write_spec(parallel="auto"), "train.global_batch=7", "train.device=cpu", "--nproc", 2)
    assert result.returncode == 2
    assert "train.global_batch 7 is not a multiple of" in result.stderr
    assert "use global_batch 6 or 8" in result.stderr
    assert "rank" not in result.stdout


def test_a_launched_run_is_found_by_its_directory_and_a_missing_one_is_named(argosy: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    assert "no step logged yet" in argosy("status", "elsewhere/mine").stdout
    refused = argosy("status", "runs/typo")
    assert refused.returncode == 2
    assert "there is no run directory runs/typo" in refused.stderr
    assert "argosy watch elsewhere/mine" in argosy("logs", "elsewhere/mine").stderr


def test_a_dry_run_counts_the_ranks_it_is_asked_about(argosy: Run, write_spec: Write) -> None:
    path = str(write_spec())
    refused = argosy("train", path, "parallel.dp_shard=2", "--dry-run", "--nproc", "4")
    assert refused.returncode == 2
    assert "= 2 processes, and there are 4 (--nproc 4)" in refused.stderr
    assert "device  " in argosy("train", path, "--dry-run").stdout


def test_names_and_terminals_that_are_not_utf8_end_in_no_traceback(tmp_path: Path) -> None:
    def run(*words: str | bytes, **more: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "argosy", "data", *words]
        return subprocess.run(line, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True)

    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert run("prepare", "a.jsonl", "--tokenizer", "bytes", "--output", "corpus").returncode == 0
    shown = run("inspect", "corpus", PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "tokens per document" in shown.stdout
    os.rename(tmp_path / "a.jsonl", os.fsencode(tmp_path) + b"/\xff.jsonl")
    refused = run("prepare", ".", "--tokenizer", "bytes", "--output", "other")
    assert refused.returncode == 2
    assert r"\xff.jsonl' is not UTF-8" in refused.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_verb_does_its_work_where_nobody_listens(closed: str, tmp_path: Path) -> None:
    line = f"{sys.executable} -m argosy config models {closed}"
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, check=False).returncode == 0

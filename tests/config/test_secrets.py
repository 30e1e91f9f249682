"""No copy of a run spec contains a secret, and no message is longer than a screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.resolve import resolve
from argosy.config.secrets import source_without_secrets, without_secrets
from argosy.config.yaml_reader import parse_yaml
from argosy.echo import capped, looks_secret, redact, shorten
from argosy.errors import ArgosyError

Write = Callable[..., Path]
PART = "T0KENxyzT0KENxyz12345"
SECRETS = {
    "webhook": {"log": {"alerts": {"webhook": f"https://hooks.example/services/{PART}"}}},
    "http": {"data": {"train": [{"path": f"https://user:{PART}@host/corpus"}]}},
    "password with an @": {"data": {"train": [{"path": f"s3://key:a@{PART}@bucket/corpus"}]}},
    "signature": {"data": {"tokenizer": f"https://a.blob.core.windows.net/t.json?sv=1&sig={PART}"}},
    "presigned": {
        "data": {"tokenizer": f"https://b.s3.amazonaws.com/t?X-Amz-Credential={PART}&X-Amz-Signature={PART}"}
    },
    "variable": {"cluster": {"env": {"WANDB_API_KEY": PART}}},
    "shell": {"cluster": {"slurm": {"setup": [f"export HF_TOKEN={PART}"]}}},
    "token": {"cluster": {"env": {"HARMLESS": f"hf_{PART}"}}},
    "otel": {"log": {"sinks": {"otel": f"https://collector.example/?api_key={PART}"}}},
}


@pytest.mark.parametrize("name", SECRETS)
def test_no_copy_of_a_spec_holds_a_secret(name: str) -> None:
    tree = SECRETS[name]
    clean = without_secrets(tree)
    assert PART not in str(clean)
    assert "***" in str(clean)
    # A resume compares redacted copies.
    assert without_secrets(clean) == clean
    for text in (yaml.safe_dump(tree, width=1000), yaml.safe_dump(tree, default_flow_style=True), json.dumps(tree)):
        shown = source_without_secrets(text)
        assert PART not in shown
        assert parse_yaml(shown, "x")[0] == clean


@pytest.mark.parametrize(
    "tree",
    [
        {"name": "task-specific-pretraining-run-3"},
        {"runs_dir": "/mnt/disk-0000-shared-pretraining/runs"},
        {"data": {"train": [{"path": "/data/TOKENS=1T/corpus"}]}},
        {"init_from": "/mnt/sk-0000-shared-pretraining-models/x"},
    ],
)
def test_names_and_paths_that_only_look_like_secrets_are_kept(tree: dict[str, Any]) -> None:
    """Later commands read names and paths from the redacted copy."""
    assert without_secrets(tree) == tree


def test_a_private_key_is_cut_out_whole_and_a_long_token_to_its_end() -> None:
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{PART}\n{PART}\n-----END RSA PRIVATE KEY-----"
    assert PART not in redact(f"before {key} after")
    assert redact(f"before {key} after").endswith("*** after")
    assert "aaaa" not in capped("https://b/k?X-Amz-Security-Token=" + "a" * 2000)


def test_a_secret_written_with_escapes_is_not_copied_either() -> None:
    written = "".join(f"\\x{ord(letter):02x}" for letter in PART)
    text = f'# by hand\nlog: {{alerts: {{webhook: "https://hooks.example/{written}"}}}}\n'
    assert parse_yaml(text, "x")[0]["log"]["alerts"]["webhook"].endswith(PART)
    shown = source_without_secrets(text)
    assert PART not in shown
    assert written not in shown


@pytest.mark.parametrize(
    "harmless",
    [
        "train.tokens=20B", "data.tokenizer=bytes", "cluster.secrets.HF_TOKEN=hf-token/token", "TOKENIZERS_PARALLELISM=false",
        "abfs://container@account.dfs.core.windows.net/corpus", "http://127.0.0.1:4318", "export HF_TOKEN=$(cat ~/.hf)",
        "export HF_TOKEN=$TOKEN", "registry/argosy@sha256:0000", "env:OUR_HOOK", "{HF_TOKEN: hf-token/token}", "a/b@c:d",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(harmless: str) -> None:
    assert redact(harmless) == harmless
    assert not looks_secret(harmless)


def test_a_refused_webhook_is_not_shown(write_spec: Write) -> None:
    path = write_spec(log={"alerts": {"webhook": f"htps://hooks.example/{PART}"}})
    with pytest.raises(ArgosyError) as refusal:
        resolve(path)
    assert PART not in str(refusal.value) + str(refusal.value.as_dict())


def test_what_is_shown_and_stored_of_a_run_has_no_secret(write_spec: Write, tmp_path: Path) -> None:
    from argosy.config.show import resolved as show
    from argosy.record.rundir import RunDir

    path = write_spec(log={"alerts": {"webhook": f"https://hooks.example/{PART}"}})
    assert PART not in show(path, [], as_json=False) + show(path, [], as_json=True)
    run = RunDir(tmp_path / "runs" / "tiny")
    run.open_for_training()
    found = resolve(path)
    run.store(found, path.read_text(), {"corpora": []}, {})
    assert run.load_spec().log.alerts.webhook == "https://hooks.example/***"
    for file in run.root.iterdir():
        assert PART not in (file.read_text() if file.is_file() else "")
    assert run.compare(found, {"corpora": []}, {}) == []
    elsewhere = resolve(path, [f"log.alerts.webhook=https://other.example/{PART}"])
    assert run.compare(elsewhere, {"corpora": []}, {}) == [
        "log.alerts.webhook: https://hooks.example/*** -> https://other.example/***"
    ]


def test_long_values_are_shortened_in_the_middle_and_the_count_is_said() -> None:
    assert shorten("a" * 100, 100) == "a" * 100
    assert (
        shorten("a" * 60 + "b" * 300_000 + "c" * 40, 120)
        == "a" * 60 + "b" * 20 + "… 299,980 characters left out …" + "c" * 40
    )


@given(st.integers(0, 5), st.sampled_from(["x", "x ", "x\n", "token=", "://a:", "&key", "k@", "\u1234"]))
def test_no_message_is_longer_than_a_screen(magnitude: int, unit: str) -> None:
    long: Any = unit * 10**magnitude
    error = ArgosyError("config.bad-value", f"{long!r} is wrong", fix=long, key=long, value=long, origin="run.yaml:3")
    assert len(str(error)) < 25_000
    assert len(str(error.as_dict())) < 35_000
    assert len(capped(long)) <= max(len(long), 6_200)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "RUN", "train.steps=" + "9" * 100_000],
        ["train", "RUN", "model.family=" + "x" * 100_000],
        ["train", "RUN", "x" * 100_000 + "=1"],
        ["train", "RUN", "--nproc", "z" * 100_000],
        ["y" * 100_000],
    ],
    ids=["number", "choice", "key", "option", "verb"],
)
def test_no_command_repeats_a_long_argument(
    arguments: list[str], write_spec: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from argosy.cli.app import main

    path = str(write_spec())
    monkeypatch.setattr("sys.argv", ["argosy", *(path if word == "RUN" else word for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert len(said.out + said.err) < 10_000

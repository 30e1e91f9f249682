"""YAML means what people think it means, and cannot do harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.yaml_reader import MAX_BYTES, parse_yaml, read_yaml
from argosy.errors import ArgosyError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("3E5", 3e5),
        (".5", 0.5),
        ("1_000", 1000),
        ("-7", -7),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("True", "True"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ("010", "010"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("500ba", "500ba"),
        ("20B", "20B"),
    ],
)
def test_plain_values_are_what_they_look_like(text: str, value: object) -> None:
    parsed = parse_yaml(f"key: {text}", "test")[0]["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_key_knows_its_line() -> None:
    _, lines = parse_yaml("a: 1\nb:\n  c: 2\n  d: [x, {e: 3}]\n", "test")
    assert (lines["a"], lines["b.c"], lines["b.d.1.e"]) == (1, 3, 4)


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2",
        "a: {b: 1, b: 2}",
        "a: [1, 2",
        "a: !!python/object/apply:os.system ['true']",
        "a: !custom 1",
        "? [x]\n: 1",
        "a: &x [*x]",
        "[" * 5000,
    ],
)
def test_what_cannot_be_a_run_spec_is_refused(text: str) -> None:
    with pytest.raises(ArgosyError) as refusal:
        parse_yaml(text, "run.yaml")
    assert refusal.value.code == "config.bad-yaml"


def test_a_document_that_unfolds_without_end_is_refused() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(ArgosyError, match="values"):
        parse_yaml(text, "bomb")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    for name, code in {
        "missing.yaml": "config.not-found",
        "binary.yaml": "config.bad-yaml",
        "huge.yaml": "config.bad-yaml",
        ".": "config.not-found",
    }.items():
        with pytest.raises(ArgosyError) as refusal:
            read_yaml(tmp_path / name)
        assert refusal.value.code == code


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ArgosyError, match="is larger than"):
        read_yaml(Path("/dev/zero"))

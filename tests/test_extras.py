"""A message that names an extra gives a command that works for the way Argosy was installed."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from argosy import extras

ROOT = Path(__file__).parents[1]


def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: dict[str, Any] | None) -> str:
    """Return the command of a process whose package is not in a clone, with pip's record of where it came from."""
    files = {"direct_url.json": json.dumps(origin)} if origin else {}

    class Distribution(metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            return files.get(filename)

        def locate_file(self, path: Any) -> Any:
            return tmp_path / path

    monkeypatch.setattr(extras, "__file__", str(tmp_path / "lib" / "argosy" / "extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: Distribution())
    return extras.install_extra("dash")


def test_a_clone_is_installed_from_again() -> None:
    assert extras.install_extra("dash") == f"pip install -e '{ROOT}[dash]'"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "argosy[dash]"),
        ({"url": "file:///home/a%20b/argosy", "dir_info": {}}, "/home/a b/argosy[dash]"),
        ({"url": "file:///tmp/argosy-0.1.0-py3-none-any.whl", "archive_info": {}}, "/tmp/argosy-0.1.0-py3-none-any.whl[dash]"),
        ({"url": "https://h/argosy.git", "vcs_info": {"vcs": "git"}}, "argosy[dash] @ git+https://h/argosy.git"),
        ({"url": "https://h/argosy.whl", "archive_info": {}}, "argosy[dash] @ https://h/argosy.whl"),
    ],
)  # fmt: skip
def test_the_command_follows_pips_record(monkeypatch: Any, tmp_path: Path, origin: Any, requirement: str) -> None:
    assert _installed(monkeypatch, tmp_path, origin) == f"pip install '{requirement}'"


def test_no_other_text_says_how_an_extra_is_installed() -> None:
    """No release is on an index yet: pages say what works in a clone, and messages ask `install_extra`."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    sources = [p for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".yaml") and p.name != "extras.py"]
    for path in [*pages, *sources]:
        assert not re.search(r"pip install (--upgrade |')?argosy|`argosy\[", path.read_text()), path


def test_every_extra_that_is_named_exists() -> None:
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = "".join(path.read_text() for folder in ("src", "docs") for path in (ROOT / folder).rglob("*.[pm][yd]"))
    named = set(re.findall(r'install_extra\(["\'](\w+)["\']\)|pip install \'\.\[(\w+)\]\'', texts))
    assert {"".join(pair) for pair in named} <= set(known)
    assert ("dash", "") in named

"""The images: an ordinary user, one entry point, nothing unpinned, no key inside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rendering import ROOT

FILES = sorted((ROOT / "docker").glob("Dockerfile*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_is_that_of_an_ordinary_user_with_one_entry_point(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "1000:1000"
    assert re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE) == ['["argosy"]']
    assert "ssh" not in text.lower()
    assert not re.search(r"(TOKEN|PASSWORD|SECRET)", text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_in_an_image_changes_by_itself(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    [base] = re.findall(r"^ARG BASE(?:=(.*))?$", text, re.MULTILINE)
    assert base == "" or re.search(r"@sha256:[0-9a-f]{64}$", base), "named by its digest, here or when it is built"
    assert ":latest" not in text
    for package in re.findall(r"pip install --no-cache-dir (?!--constraint)(\S+)", text):
        assert "==" in package
    if "curl" in text:
        assert "sha256sum --check" in text


def test_the_rendered_user_is_the_images_own() -> None:
    from argosy.config.cluster import ClusterSpec

    assert ClusterSpec().user == 1000

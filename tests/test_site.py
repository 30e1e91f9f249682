"""The documentation builds as a site without a warning, every link of it leads somewhere, and nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """Collects what a page loads, what it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors.update(value for key in ("id", "name") if (value := found.get(key)))
        target = found.get("src") or found.get("href")
        if target:
            (self.links if tag == "a" else self.loads).append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "0", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_of_the_site_leads_to_a_file_and_an_anchor(read: dict[Path, Page]) -> None:
    for path, page in read.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name} links to {link}"
            if parts.fragment and target in read:
                assert unquote(parts.fragment) in read[target].anchors, f"{path.name} links to {link}"


def test_a_page_loads_nothing_from_elsewhere(site: Path, read: dict[Path, Page]) -> None:
    for path, page in read.items():
        assert [link for link in page.loads if urlsplit(link).netloc] == [], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?https?:", path.read_text()), path.name


def test_the_time_of_the_build_is_in_no_page(site: Path) -> None:
    """So that the same sources give the same bytes: `make site` builds twice and compares."""
    assert set(re.findall(r"<lastmod>(.*?)</lastmod>", (site / "sitemap.xml").read_text())) <= {"1970-01-01"}
    assert (site / "sitemap.xml.gz").read_bytes()[4:8] == bytes(4)

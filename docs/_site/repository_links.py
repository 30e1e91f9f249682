"""A hook of MkDocs: pages may link to files of the repository outside docs/, and the site has copies of these files.

A page is read in two places: in the repository, where `../../examples/moe.yaml` is right, and on the site, which has only docs/. The
hook copies each linked file to `repository/` of the site, writes a page for each linked folder, and changes the links.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
COPIES = "repository"
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside docs/."""
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(page.content_string):
            path = _outside(page.src_uri, link)
            if path is not None:
                _add(files, config, path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to the copies."""

    def inside(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[1])
        if path is None:
            return found[0]
        copy = f"{COPIES}/{path}/index.md" if (ROOT / path).is_dir() else f"{COPIES}/{path}"
        return f"]({relpath(copy, PurePosixPath(page.file.src_uri).parent)}"

    return _LINK.sub(inside, markdown)


def _outside(source: str, link: str) -> str | None:
    """Return the path from the repository's root that a link of a page leads to, or None if it stays in docs/."""
    path = normpath(str(PurePosixPath("docs", source).parent / link))
    return None if path.startswith("docs/") or not (ROOT / path).exists() else path


def _add(files: Files, config: Any, path: str) -> None:
    if (ROOT / path).is_dir():
        names = sorted(child.name for child in (ROOT / path).iterdir() if child.is_file())
        listed = "\n".join(f"- [{name}]({name})" for name in names)
        _append(files, config, f"{path}/index.md", f"# {path}\n\n{listed}\n")
        for name in names:
            _add(files, config, f"{path}/{name}")
    else:
        _append(files, config, path, (ROOT / path).read_bytes())


def _append(files: Files, config: Any, path: str, content: str | bytes) -> None:
    if f"{COPIES}/{path}" not in files.src_uris:
        files.append(File.generated(config, f"{COPIES}/{path}", content=content, inclusion=InclusionLevel.NOT_IN_NAV))

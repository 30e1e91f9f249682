"""The command that installs an optional part (an extra) into this environment.

Argosy is installed from a clone, from a wheel, from a repository's address or from an index, and `pip install 'argosy[dash]'` works
for the last of them only. pip records which it was, so every message that names an extra can give the command that works here.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_extra(extra: str) -> str:
    """Return the pip command that adds an extra to the installation this process runs from."""
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    try:
        origin = distribution("argosy").read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return f"pip install '{_requirement(extra, json.loads(origin) if origin else None)}'"


def _requirement(extra: str, origin: dict[str, object] | None) -> str:
    """Return the requirement for an extra. `origin` is pip's direct_url.json, or None for a package of an index."""
    if origin is None:
        return f"argosy[{extra}]"
    url = str(origin["url"])
    if url.startswith("file:"):
        return f"{unquote(urlsplit(url).path)}[{extra}]"
    vcs = origin.get("vcs_info")
    return f"argosy[{extra}] @ " + (f"{vcs['vcs']}+{url}" if isinstance(vcs, dict) else url)

"""`argosy ckpt push`: upload an exported model to the Hugging Face Hub, by its own client.

The client finds the token (HF_TOKEN, or `hf auth login`) and the server (HF_ENDPOINT). Only the files of a model are sent: JSON,
text, tokenizers and safetensors.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.console.formats import volume
from argosy.errors import ArgosyError
from argosy.untrusted import open_regular

_KINDS = (".json", ".safetensors", ".txt", ".model", ".md", ".jinja")


@dataclass(frozen=True)
class Pushed:
    directory: str
    repo: str
    files: list[str]
    bytes: int
    # None: nothing was sent.
    url: str | None

    def describe(self) -> str:
        what = f"{len(self.files)} files, {volume(self.bytes)}, of {self.directory}"
        return f"would push {what} to {self.repo}" if self.url is None else f"pushed {what} to {self.url}"


def push_model(directory: Path, repo: str, *, private: bool, dry_run: bool = False) -> Pushed:
    """Upload the model in a directory that `argosy ckpt export` made. The repository is made if it does not exist.

    Raises:
        ArgosyError: the directory holds no model, the name is none, the client is not installed, or the Hub refused.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is None:
        raise ArgosyError(
            "config.bad-value",
            f"{repo!r} is no name of a repository",
            key="REPO",
            value=repo,
            fix="write OWNER/NAME, as in my-team/first",
        )
    files = sorted(path for path in directory.glob("*") if path.name.endswith(_KINDS)) if directory.is_dir() else []
    if not any(path.name == "config.json" for path in files) or not any(p.suffix == ".safetensors" for p in files):
        raise ArgosyError(
            "hf.bad-files",
            f"{directory} holds no exported model: it lacks config.json or *.safetensors",
            key="DIR",
            value=str(directory),
            fix=f"argosy ckpt export RUN --to {directory}",
        )
    for path in files:
        # A link could lead to a file that nobody meant to publish.
        open_regular(path, within=directory).close()
    client = _client()
    size = sum(path.stat().st_size for path in files)
    facts = Pushed(str(directory), repo, [path.name for path in files], size, None)
    if dry_run:
        return facts
    api = client.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=directory,
            allow_patterns=facts.files,
            commit_message="Upload a model trained with Argosy",
        )
    except Exception as error:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ArgosyError(
            "hf.push-failed",
            f"{repo} was not pushed: {cause}",
            fix="check the token (HF_TOKEN, or `hf auth login`) and its right to write; run it again: what is there is not sent twice",
        ) from error
    return Pushed(facts.directory, repo, facts.files, size, f"{api.endpoint}/{repo}")


def _client() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ArgosyError(
            "hf.missing-extra",
            "pushing to the Hub needs the Python package huggingface_hub",
            fix="pip install huggingface_hub",
        ) from None

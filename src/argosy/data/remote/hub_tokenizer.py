"""Fetch the files of a tokenizer from the Hugging Face Hub, once, and record the commit they came from."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from argosy.data.remote.fetch import FetchJob, FetchJournal
from argosy.data.remote.hub import Entry, Hub
from argosy.data.remote.web import RETRY, TIMEOUT_S, Web
from argosy.data.text.hub_names import HubTokenizer
from argosy.errors import ArgosyError
from argosy.files import replace_file

# Written last: a directory that has it is complete, and stays at that commit.
SOURCE = "source.json"
# What one tokenizer needs, in the order of preference.
_SETS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
# What conversations need besides, where a repository has it: the chat template and the names of special tokens.
_BESIDE = ("tokenizer_config.json", "chat_template.jinja")


def fetch_tokenizer(wanted: HubTokenizer) -> str:
    """Download a tokenizer unless it is there, and return a sentence about it.

    Raises:
        ArgosyError: the repository is missing, gated or has no tokenizer, or the Hub cannot be reached.
    """
    directory = wanted.directory
    if (directory / SOURCE).exists():
        pinned = orjson.loads((directory / SOURCE).read_bytes())
        return f"{directory}: already there, {wanted.repo} at commit {pinned['commit'][:12]}"
    hub = Hub(Web(RETRY, TIMEOUT_S), "models")
    found = hub.find(wanted.repo, wanted.revision)
    files = [hub.remote_file(found, entry) for entry in _chosen(wanted, hub.tree(found))]
    with FetchJournal(directory) as journal:
        fetched = FetchJob(hub.web, files, directory, journal).run(1)
    hashes = {file.path: done.sha256 for file, done in zip(files, fetched.files, strict=True)}
    facts = {"repo": wanted.repo, "revision": wanted.revision, "commit": found.commit, "sha256": hashes}
    replace_file(directory / SOURCE, orjson.dumps(facts, option=orjson.OPT_INDENT_2), sync=True)
    return f"{directory}: {', '.join(hashes)} of {wanted.repo} at commit {found.commit[:12]}"


def _chosen(wanted: HubTokenizer, entries: Sequence[Entry]) -> list[Entry]:
    there = {entry.path: entry for entry in entries if not entry.is_folder}
    for names in _SETS:
        if all(name in there for name in names):
            return [there[name] for name in (*names, *_BESIDE) if name in there]
    raise ArgosyError(
        "tokenizer.not-found",
        f"{wanted.repo} has no tokenizer.json, no tokenizer.model and no vocab.json beside a merges.txt",
        key="data.tokenizer",
        value=f"hf:{wanted.repo}",
        fix="name a model of the Hub that has one, or give a file",
    )

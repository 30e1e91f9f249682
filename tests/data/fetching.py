"""Helpers of the `argosy data fetch` tests: a loopback Hub with common data sets, and short functions to fetch from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import Hub

from argosy.data.remote.fetch import JOURNAL, Fetched, FetchOptions, fetch
from argosy.data.remote.sources import Choice
from argosy.errors import ArgosyError
from argosy.retry import RetryPolicy

TOKEN = "hf_canary_0123456789"
HASTE = RetryPolicy(attempts=6, base_s=0.01, cap_s=0.05, jitter=0.5, longest_retry_after_s=5)
TIMEOUT_S = 20.0
C4 = "allenai/c4"
CARD = {
    "configs": [
        {"config_name": "en", "data_files": [
            {"split": "train", "path": "en/c4-train.*.json.gz"},
            {"split": "validation", "path": "en/c4-validation.*.json.gz"},
        ]},
        {"config_name": "realnewslike", "data_files": [{"split": "train", "path": "realnewslike/*.json.gz"}]},
    ]
}  # fmt: skip


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(name="hub")
def loopback_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("no_proxy", "*")
        for i in range(5):
            server.files[C4][f"en/c4-train.{i:05d}-of-01024.json.gz"] = noise(20_000, i)
            server.files[C4][f"realnewslike/c4-train.{i:05d}.json.gz"] = noise(30, i)
        for i in range(2):
            server.files[C4][f"en/c4-validation.{i:05d}-of-00008.json.gz"] = noise(500, 10 + i)
        server.files[C4]["README.md"] = b"# C4"
        server.files[C4]["en/notes.txt"] = b"kept in git"
        server.cards[C4] = CARD
        for chunk in (1, 2):
            for i in (0, 1, 10):
                server.files["cerebras/SlimPajama-627B"][f"train/chunk{chunk}/example_train_{i}.jsonl.zst"] = noise(
                    50, i
                )
            server.files["cerebras/SlimPajama-627B"][f"validation/chunk{chunk}/example_holdout_0.jsonl.zst"] = noise(60)
            server.files["cerebras/SlimPajama-627B"][f"test/chunk{chunk}/example_holdout_0.jsonl.zst"] = noise(70)
        for language in ("de", "fr"):
            server.files["oscar-corpus/OSCAR-2301"][f"{language}_meta/{language}_meta_part_1.jsonl.zst"] = noise(80)
            server.files["oscar-corpus/OSCAR-2301"][f"{language}_meta/checksum.sha256"] = b"x"
        yield server


def one_file(hub: Hub, size: int = 20_000) -> tuple[str, bytes]:
    content = noise(size, 7)
    hub.files["one/file"]["big.jsonl.zst"] = content
    return "one/file", content


def go(
    output: Path,
    *names: str,
    workers: int = 2,
    retry: RetryPolicy = HASTE,
    timeout_s: float = TIMEOUT_S,
    **choice: object,
) -> Fetched:
    options = FetchOptions(Choice(**choice), workers, retry, timeout_s=timeout_s)  # type: ignore[arg-type]
    return fetch(names, output, options)


def refused(output: Path, *names: str, **options: object) -> ArgosyError:
    with pytest.raises(ArgosyError) as caught:
        go(output, *names, **options)  # type: ignore[arg-type]
    return caught.value


def stored(output: Path) -> dict[str, bytes]:
    """Return all finished files by name."""
    files = (path for path in output.rglob("*") if path.is_file() and path.name != JOURNAL)
    return {str(path.relative_to(output)): path.read_bytes() for path in files if path.suffix != ".partial"}


def wanted(hub: Hub, repo: str, *prefixes: str) -> dict[str, bytes]:
    return {name: content for name, content in hub.files[repo].items() if name.startswith(prefixes)}

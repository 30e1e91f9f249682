"""The small files that belong to a model beside its weights: tokenizer, special tokens, chat template, generation config.

They come from strangers. Only regular files of the directory itself or the Hub's cache are read, and files named as JSON or
text must be valid. A copy never has wider permissions than the original.
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from argosy.data.text.engines import NASTY
from argosy.data.text.tokenizer import LARGEST_TOKENIZER, load_tokenizer
from argosy.errors import ArgosyError
from argosy.untrusted import MIB, open_regular, read_regular

NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_BINARY = (".model",)
_VOCABULARIES = frozenset(
    {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"}
)


def listed_assets(directory: Path) -> list[Path]:
    """Return the side files that exist, of any file type. `check_assets` refuses wrong types."""
    return [directory / name for name in NAMES if os.path.lexists(directory / name)]


def check_assets(directory: Path) -> None:
    """Refuse side files whose content does not fit their names, and a tokenizer that does not work."""
    for path in listed_assets(directory):
        _content(path, directory)
    for path in tokenizer_files(directory):
        try:
            load_tokenizer(str(path), within=directory).encode_batch(NASTY)
        except ArgosyError as error:
            # Without the sentencepiece package, a SentencePiece model cannot be checked.
            if error.code != "data.missing-extra":
                raise


def copy_assets(directory: Path, to: Path) -> None:
    """Copy the side files that `to` does not have. Existing ones were put there on purpose."""
    for path in listed_assets(directory):
        target = to / path.name
        if os.path.lexists(target):
            continue
        content, mode = _content(path, directory)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the files a tokenizer can be loaded from, the preferred one first."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    there = [directory / name for name in names if (directory / name).exists()]
    return [path for path in there if path.name != "vocab.json" or (directory / "merges.txt").exists()]


def _content(path: Path, directory: Path) -> tuple[bytes, int]:
    """Return a side file's bytes and the permissions a copy may have, at most the original's."""
    limit = LARGEST_TOKENIZER if path.name in _VOCABULARIES else 16 * MIB
    try:
        with open_regular(path, within=directory) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o666 | 0o600
        content = read_regular(path, limit, within=directory)
        if path.suffix == ".json":
            if not isinstance(orjson.loads(content), dict):
                raise ValueError("it holds no keys and values")
        elif path.suffix not in _BINARY:
            content.decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgosyError(
            "hf.bad-files",
            f"{path} cannot be used: {why}",
            fix="fetch the model again; if the file is not needed, remove it",
        ) from None
    return content, mode

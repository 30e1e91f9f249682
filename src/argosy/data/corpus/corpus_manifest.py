"""The manifest of a prepared corpus: its inputs, its tokenizer, and the sha256 of every file.

It is written last, so a directory with a manifest is complete. A manifest is untrusted input: file names that lead out of the
directory are refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.untrusted import MIB, read_regular

FILE_NAME = "manifest.json"
_MAX_BYTES = 1024 * MIB
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerFacts(_Part):
    """The tokenizer that a corpus was prepared with."""

    fingerprint: str
    vocab_size: int
    eod_id: int | None
    # The copy of the tokenizer beside the shards.
    file: PlainName


class Shard(_Part):
    """One `.bin/.idx` pair of a corpus."""

    name: PlainName
    documents: int
    sequences: int
    tokens: int
    max_token: int
    bin_sha256: str
    idx_sha256: str
    # The hash of NAME.blocks, which holds the hashes of its blocks. Corpora of earlier versions have none.
    blocks_sha256: str | None = None


class Source(_Part):
    """An input as it was read. Corpora of earlier versions have neither `version` nor `content`."""

    path: str
    bytes: int
    documents: int
    quarantined: int
    # The modification time, ETag, generation or hash of the input.
    version: str | None = None
    # A hash of the content that was read: BLAKE2b over the CRC-32 of each block's records.
    content: str | None = None


class ChatFacts(_Part):
    """How the conversations of a corpus became text. The sequences of a document alternate: context, then what is learnt."""

    template_sha256: str
    # The copy of the chat template beside the shards.
    file: PlainName
    # True if a document is two conversations that differ in the last answer: the chosen one, then the rejected one.
    pairs: bool = False


class Manifest(_Part):
    """The content of manifest.json."""

    format: Literal["argosy-corpus"] = "argosy-corpus"
    version: Literal[1] = 1
    tokenizer: TokenizerFacts
    append_eod: bool
    dtype: str
    shards: Annotated[list[Shard], Field(min_length=1)]
    sources: list[Source]
    quarantined: dict[str, int]
    # Set if the documents are conversations. Left out of the file otherwise: earlier versions do not know it.
    chat: ChatFacts | None = None

    @property
    def beside(self) -> list[str]:
        """The names of the files beside the shards that say what their ids mean."""
        return [self.tokenizer.file, *([] if self.chat is None else [self.chat.file])]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write manifest.json atomically, and sync it to disk."""
    replace_file(directory / FILE_NAME, _content(manifest), sync=True)


def manifest_hash(manifest: Manifest) -> str:
    """Return the sha256 of the file that `write_manifest` writes."""
    return hashlib.sha256(_content(manifest)).hexdigest()


def stored_manifest_hash(directory: Path) -> str:
    """Return the sha256 of manifest.json, or an empty string if there is none."""
    try:
        return hashlib.sha256((directory / FILE_NAME).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def _content(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=2, exclude={"chat"} if manifest.chat is None else None).encode() + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Read and validate manifest.json. Raise `data.bad-manifest` if it cannot be read or is not valid."""
    path = directory / FILE_NAME
    try:
        return Manifest.model_validate_json(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise ArgosyError(
            "data.bad-manifest", f"{path} cannot be read: {error.strerror}", fix="check the path"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ArgosyError(
            "data.bad-manifest", f"{path}: {where}: {first['msg']}", fix="prepare the corpus again, or restore the file"
        ) from None

"""The work of `prepare`: inputs are split into blocks, blocks are assigned to shards, and shards to machines.

The assignment is a pure function of the inputs and the options, so every process and machine computes the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from argosy.data.chat.chat_template import ChatFormat
from argosy.data.corpus.corpus_manifest import FILE_NAME, stored_manifest_hash
from argosy.data.corpus.indexed import dtype_for
from argosy.data.prepare.parts import PartName, PartOptions
from argosy.data.prepare.work_plan import Plan
from argosy.data.text.inputs import InputFile, group_inputs
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.host_cores import available_cores

QUARANTINE_FILE = "quarantine.jsonl"
PARTS = ".parts"
# The hashes of the plan and the manifests of a finished job of several machines. The bytes of the corpus do not depend on it.
PLAN_FILE = ".plan"


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `argosy data prepare`."""

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    # Take each line of a .txt file as a document, instead of the whole file.
    text_lines: bool = False
    # Also read files whose suffix is not known as text.
    as_text: bool = False
    # The fraction of records that may be quarantined.
    max_bad: float = 0.5
    overwrite: bool = False
    shards: int = 1
    workers: int = field(default_factory=available_cores)
    # The number of this machine among `machines` that divide the work.
    machine: int = 0
    machines: int = 1
    # Shuffle the documents of each shard with this seed. None: keep their order.
    shuffle_seed: int | None = None
    # How conversations become text. None: the records are texts, under `keys`.
    chat: ChatFormat | None = None
    # The address of a Ray cluster whose workers make the parts, or "ray". None: processes of this machine.
    cluster: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the corpora that each record has a document in."""
        return self.keys if self.chat is None else ("messages",)

    def __post_init__(self) -> None:
        require_machine(self.machine, self.machines)


def require_machine(machine: int, machines: int) -> None:
    """Refuse the number of a machine beyond those that divide the work."""
    if machine >= machines:
        raise ArgosyError(
            "config.bad-value",
            f"{machines} machines are numbered from 0 to {machines - 1}",
            key="--shard-index",
            value=machine,
            fix=f"--shard-index {machines - 1} or less, or a larger --shard-count",
        )


class Work:
    """The inputs, options and derived layout of a job."""

    def __init__(self, files: list[InputFile], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> None:
        _check_keys(options.keys, files)
        self.files, self.tokenizer, self.output, self.options = files, tokenizer, output, options
        self.corpora = corpora_of(output, options.columns)
        self.parts = output / PARTS
        self.groups = group_inputs(files, options.text_lines)
        self.part_options = PartOptions(
            keys=options.columns,
            append_eod=options.append_eod,
            text_lines=options.text_lines,
            block_bytes=block_size(files),
            chat=options.chat,
        )
        # The id that ends each document. Refuse a tokenizer without one before work starts.
        self.appended = tokenizer.eod_id if options.append_eod and options.chat is None else None

    @property
    def eod(self) -> int | None:
        """The end-of-document id that the manifest records. A chat template writes its own at the end of a turn."""
        if self.options.chat is None:
            return self.appended
        ends = self.options.chat.token("eos_token")
        try:
            return self.tokenizer.eod_id if ends is None else self.tokenizer.id_of(ends)
        except ArgosyError:
            # The settings name no eos_token, and the tokenizer has none of the usual names.
            return None

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_for(self.tokenizer.vocab_size)

    @property
    def own_shards(self) -> range:
        """The shards that this machine makes."""
        return range(self.options.machine, self.options.shards, self.options.machines)

    def shard_of(self, name: PartName) -> int:
        """Return the shard of a part: blocks go to shards round-robin, and each file starts with the next shard."""
        return (name.group + name.block) % self.options.shards

    def is_beyond(self, name: PartName) -> bool:
        """Return True if a block is past the end of its file. For compressed files and tables this is known only after a read."""
        first = self.groups[name.group][0]
        return is_past_end(first, name, self.part_options.block_bytes, text_lines=self.options.text_lines)

    @property
    def plan(self) -> Plan:
        """Everything that determines the bytes of the corpus."""
        facts = [self.tokenizer.fingerprint, self.appended, self.part_options.facts()]
        facts += [self.options.shards, self.options.shuffle_seed]
        options = hashlib.sha256(repr(facts).encode()).hexdigest()
        return Plan.of(options, self.files, with_inodes=self.options.machines == 1)

    @property
    def overwrite(self) -> bool:
        return self.options.overwrite

    def clear(self) -> None:
        """Remove the corpus of another job."""
        (self.output / PLAN_FILE).unlink(missing_ok=True)
        for directory in {self.output, *self.corpora}:
            # Without a manifest the directory is not a corpus until the new manifest is written.
            (directory / FILE_NAME).unlink(missing_ok=True)
            (directory / QUARANTINE_FILE).unlink(missing_ok=True)
            for old in directory.glob("shard-*.*"):
                old.unlink()

    def is_done(self) -> bool:
        """Return True if the corpus is finished: the manifest of the last key is written last."""
        return any((directory / FILE_NAME).exists() for directory in (self.output, self.corpora[-1]))

    def is_result(self) -> bool:
        """Return True if several machines, of which this is one, have finished the corpus by the same plan."""
        if self.options.machines == 1 or not self.is_done():
            return False
        try:
            stored = (self.output / PLAN_FILE).read_text()
        except FileNotFoundError:
            return False
        # Another command may have replaced the corpus and left the file.
        return stored == self.result_of(map(stored_manifest_hash, self.corpora))

    def result_of(self, manifests: Iterable[str]) -> str:
        """Return the content of `.plan`: the hashes of the plan and of the manifests."""
        return " ".join([self.plan.digest(), *manifests])


def corpora_of(output: Path, keys: Sequence[str]) -> list[Path]:
    """Return the directory of each key's corpus: `output` itself for one key, else a subdirectory named after the key."""
    if len(keys) == 1:
        return [output]
    # A key may contain a slash.
    names = (quote(key, safe="") for key in keys)
    return [output / (f"%2E{name[1:]}" if name.startswith(".") else name) for name in names]


def _check_keys(keys: Sequence[str], files: Sequence[InputFile]) -> None:
    plain = next((file.path for file in files if file.is_text), None)
    if len(keys) > 1 and (plain is not None or len(set(keys)) < len(keys)):
        cause = f"{plain} is plain text, which has no keys" if plain is not None else "a key is named twice"
        raise ArgosyError(
            "config.bad-value",
            cause,
            key="--key",
            value=", ".join(keys),
            fix="name each key once, for records that have it",
        )


def is_past_end(first: InputFile, name: PartName, block_bytes: int, *, text_lines: bool) -> bool:
    """Return True if a block is known to be past the end of the group whose first file is `first`."""
    if first.is_table or first.is_compressed:
        return False
    size = first.size if text_lines or not first.is_text else 1
    return name.block * block_bytes >= max(1, size)


def block_size(files: Sequence[InputFile]) -> int:
    """Return the block size: 1/64 of all inputs, as a power of two from 4 to 64 MiB. Enough blocks to share, not too many files."""
    share = sum(file.size for file in files) // 64
    return min(64 << 20, max(4 << 20, 1 << (share - 1).bit_length() if share else 0))

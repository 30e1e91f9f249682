"""The plan of a job, kept beside its parts: the options that decide the bytes, and the fingerprint of every input.

Parts are only made of inputs that match the plan, so a job that goes on after a kill compares its plan with the one kept:
parts of another version of an input are never joined with parts of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import orjson

from argosy.data.text.input_files import require_same
from argosy.data.text.inputs import InputFile
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Plan:
    options: str  # a hash of all that decides the bytes, less the inputs
    inputs: tuple[InputFile, ...]

    @classmethod
    def of(cls, options: str, files: Sequence[InputFile], *, with_inodes: bool) -> Plan:
        """`with_inodes`: False where several machines share the work, which may see the inputs under other inodes."""
        inputs = (replace(file, inode=file.inode if with_inodes else 0, address="") for file in files)
        return cls(options, tuple(inputs))

    def content(self) -> bytes:
        return orjson.dumps({"options": self.options, "inputs": [astuple(file)[:4] for file in self.inputs]})

    def difference(self, stored: bytes, output: Path) -> ArgosyError | None:
        """Why the parts made for a stored plan cannot be used for this one, or None if they can."""
        try:
            document = orjson.loads(stored)
            before = Plan(document["options"], tuple(InputFile(*fields) for fields in document["inputs"]))
        except (ValueError, KeyError, TypeError):
            return _other(output, "by an earlier version, which kept no fingerprints of its inputs")
        if before.options != self.options:
            return _other(output, "with other options")
        names, names_now = ([file.path for file in plan.inputs] for plan in (before, self))
        if names != names_now:
            changed = sorted(set(names) ^ set(names_now))
            return _other(output, f"with other inputs: {changed[0] if changed else 'their order'} differs")
        try:
            for file, now in zip(before.inputs, self.inputs, strict=True):
                require_same(file, now, since=f"after parts of {output} had been made from it")
        except ArgosyError as error:
            return error
        return None


def _other(output: Path, how: str) -> ArgosyError:
    return ArgosyError(
        "data.other-plan",
        f"{output} already holds a half-made corpus, made {how}",
        key="--output",
        value=str(output),
        fix="choose another directory, or pass --overwrite to replace it",
    )

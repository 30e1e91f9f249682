"""The plan of a job, stored beside its parts: the options that determine the bytes, and the fingerprint of every input.

Parts are made only from inputs that match the plan. A job that resumes after a kill compares its plan with the stored one, so
parts of different versions of an input are never joined.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from argosy.data.text.input_files import require_same
from argosy.data.text.inputs import InputFile
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Plan:
    """The options and inputs of a job."""

    # A hash of everything that determines the bytes, except the inputs.
    options: str
    inputs: tuple[InputFile, ...]

    @classmethod
    def of(cls, options: str, files: Sequence[InputFile], *, with_inodes: bool) -> Plan:
        """Make a plan. `with_inodes` is False if several machines divide the work, because they may see other inodes."""
        inputs = (replace(file, inode=file.inode if with_inodes else 0, address="") for file in files)
        return cls(options, tuple(inputs))

    def content(self) -> bytes:
        """Return the plan as JSON."""
        return orjson.dumps(self._facts() | {"ctimes": [file.ctime for file in self.inputs]})

    def _facts(self) -> dict[str, Any]:
        return {"options": self.options, "inputs": [astuple(file)[:4] for file in self.inputs]}

    def digest(self) -> str:
        """Return a hash of the plan that does not depend on the machine."""
        plan = replace(self, inputs=tuple(replace(file, inode=0) for file in self.inputs))
        return hashlib.sha256(orjson.dumps(plan._facts())).hexdigest()

    def touched(self, stored: bytes) -> set[str]:
        """Return the inputs whose ctime differs from that of a stored plan: their content may have changed, or only their facts.

        Plans of earlier versions kept no ctimes. Then nothing is known to have changed.
        """
        ctimes = orjson.loads(stored).get("ctimes", [])
        pairs = zip(self.inputs, ctimes, strict=False)
        return {file.path for file, before in pairs if before and file.ctime and before != file.ctime}

    def difference(self, stored: bytes, output: Path) -> ArgosyError | None:
        """Return the error that explains why the parts of a stored plan cannot be used for this one, or None if they can."""
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
        f"{output} already holds an unfinished corpus, made {how}",
        key="--output",
        value=str(output),
        fix="choose another directory, or pass --overwrite to replace it",
    )

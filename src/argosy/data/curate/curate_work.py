"""The work of `curate`: inputs are split into blocks, blocks are assigned to shards, and shards to machines, as for `prepare`."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from argosy.data.corpus.corpus_manifest import FILE_NAME, stored_manifest_hash
from argosy.data.corpus.indexed import dtype_for
from argosy.data.curate.curated_part import CuratedFacts, CurateOptions
from argosy.data.curate.pipeline_spec import Pipeline
from argosy.data.prepare.parts import PartName
from argosy.data.prepare.work import PARTS, block_size, is_past_end, require_machine
from argosy.data.prepare.work_plan import Plan
from argosy.data.text.inputs import InputFile, find_inputs, group_inputs
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.host_cores import available_cores

_log = logging.getLogger(__name__)

REPORT_FILE = "curation.json"
# Not a suffix that `prepare` reads, so that a directory of JSON lines is an input as a whole.
QUARANTINE_FILE = "quarantine.ndjson"


@dataclass(frozen=True)
class CurateSharing:
    """Who does the work. It does not change the bytes."""

    workers: int = field(default_factory=available_cores)
    # The number of this machine among `machines` that divide the work.
    machine: int = 0
    machines: int = 1
    # The address of a Ray cluster, or "ray". None: processes of this machine.
    cluster: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        require_machine(self.machine, self.machines)


class CurateWork:
    """The inputs, options and derived layout of a job."""

    def __init__(self, pipeline: Pipeline, sharing: CurateSharing) -> None:
        spec = pipeline.spec
        self.pipeline, self.options, self.output = pipeline, sharing, Path(spec.output)
        self.files = find_inputs(spec.inputs, report=_log.info)
        self.parts = self.output / PARTS
        self.groups = group_inputs(self.files, spec.txt_unit == "line")
        self.tokenizer: Tokenizer | None = None if spec.tokenizer is None else load_tokenizer(spec.tokenizer, spec.eod)
        self.part_options = CurateOptions(
            keys=(spec.key,),
            text_lines=spec.txt_unit == "line",
            block_bytes=block_size(self.files),
            fields=spec.fields,
            steps=pipeline.steps,
            examples=spec.examples,
        )
        # Refuse a tokenizer without an end-of-document token before work starts.
        self.appended = self.tokenizer.eod_id if self.tokenizer is not None and spec.append_eod else None

    @property
    def makes_tokens(self) -> bool:
        return self.tokenizer is not None

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.tokenizer is None:
            raise RuntimeError("JSON lines have no dtype")
        return dtype_for(self.tokenizer.vocab_size)

    @property
    def shards(self) -> int:
        return self.pipeline.spec.shards

    @property
    def own_shards(self) -> range:
        """The shards that this machine makes."""
        return range(self.options.machine, self.shards, self.options.machines)

    def shard_of(self, name: PartName) -> int:
        """Return the shard of a part, as for `prepare`."""
        return (name.group + name.block) % self.shards

    def is_beyond(self, name: PartName) -> bool:
        """Return True if a block is known to be past the end of its file."""
        first = self.groups[name.group][0]
        return is_past_end(first, name, self.part_options.block_bytes, text_lines=self.part_options.text_lines)

    @property
    def plan(self) -> Plan:
        """Everything that determines the bytes of the output."""
        options = self.part_options
        steps = [(label, step.model_dump_json(), _versions(step.files())) for label, step in options.steps]
        facts = [options.keys, options.text_lines, options.block_bytes, options.fields, options.examples, steps]
        tokenizer = None if self.tokenizer is None else (self.tokenizer.fingerprint, self.appended)
        content = repr([*facts, tokenizer, self.shards]).encode()
        return Plan.of(hashlib.sha256(content).hexdigest(), self.files, with_inodes=self.options.machines == 1)

    @property
    def overwrite(self) -> bool:
        return self.options.overwrite

    def is_done(self) -> bool:
        """Return True if the output is finished, or is a corpus that another command made. The report is written last."""
        is_corpus = (self.output / FILE_NAME).exists() and not (self.parts / "plan").exists()
        return is_corpus or self.is_reported()

    def is_reported(self) -> bool:
        """Return True if the report is there."""
        return (self.output / REPORT_FILE).exists()

    def is_result(self) -> bool:
        """Return True if the output is the finished result of the same plan."""
        try:
            report = orjson.loads((self.output / REPORT_FILE).read_bytes())
        except FileNotFoundError:
            return False
        # Another command may have replaced the corpus and left the report.
        is_same = report.get("manifest", "") == stored_manifest_hash(self.output)
        return is_same and bool(report.get("plan") == self.plan.digest())

    def clear(self) -> None:
        """Remove the output of another job."""
        for name in (REPORT_FILE, FILE_NAME, QUARANTINE_FILE):
            (self.output / name).unlink(missing_ok=True)
        for old in self.output.glob("shard-*.*"):
            old.unlink()


def _versions(files: tuple[str, ...]) -> list[tuple[Any, ...]]:
    found: list[InputFile] = find_inputs(files, may_repeat=True) if files else []
    return [astuple(file)[:3] for file in found]


def list_path(work: CurateWork, shard: int) -> Path:
    """Return the path of the list of a shard's parts."""
    return work.parts / f"parts-{shard:05d}"


def shard_path(work: CurateWork, shard: int) -> Path:
    """Return the path of a finished shard's facts."""
    return work.parts / f"shard-{shard:05d}"


def part_name(text: str) -> PartName:
    """Return the name of a part from its text form."""
    group, block = text.split("-")
    return PartName(int(group), int(block))


def part_facts(work: CurateWork) -> dict[str, CuratedFacts]:
    """Return the facts of all parts of all machines, in order."""
    listed = [orjson.loads(list_path(work, shard).read_bytes()) for shard in range(work.shards)]
    named = {facts.pop("name"): CuratedFacts(**facts) for of_shard in listed for facts in of_shard}
    return {name: named[name] for name in sorted(named)}

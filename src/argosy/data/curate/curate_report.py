"""The report of a curation: what each step removed and changed, with examples to look at."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from argosy.data.corpus.corpus_manifest import Manifest, Shard, Source, TokenizerFacts, manifest_hash, write_manifest
from argosy.data.curate.array_file import read_arrays
from argosy.data.curate.curate_work import QUARANTINE_FILE, REPORT_FILE, CurateWork, part_facts, shard_path
from argosy.data.curate.curated_part import CuratedFacts, read_heads
from argosy.data.curate.curated_shards import clear_unfinished_shards
from argosy.data.curate.duplicate_search import Duplicates, job_parts
from argosy.errors import ArgosyError
from argosy.files import replace_file


@dataclass
class CurationReport:
    """The content of curation.json."""

    output: str
    records: int
    documents: int
    # Characters of all records, and of those that the steps for single documents kept.
    characters_read: int
    characters_compared: int
    quarantined: dict[str, int]
    # In the order of the pipeline: name, documents removed by reason, documents changed, examples of removed ones.
    steps: list[dict[str, Any]]
    shards: list[dict[str, Any]]
    sources: list[dict[str, Any]] = field(default_factory=list)
    # A hash of the pipeline and the inputs: the same command later returns this report.
    plan: str = ""
    # The sha256 of the manifest of a tokenised corpus. Empty: the output is JSON lines.
    manifest: str = ""

    @classmethod
    def read(cls, output: Path) -> CurationReport:
        """Read the report of a finished curation."""
        return cls(**orjson.loads((output / REPORT_FILE).read_bytes()))

    def table(self) -> str:
        """Return the counts as a table for a terminal."""
        rows = [("step", "removed", "share", "changed", "reasons")]
        rows += [self._row("quarantine", self.quarantined, 0)]
        rows += [self._row(step["name"], step["removed"], step["changed"]) for step in self.steps]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            (
                f"{row[0]:<{widths[0]}}  " + "  ".join(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)) + f"  {row[4]}"
            ).rstrip()
            for row in rows
        ]
        share = self.documents / max(1, self.records)
        lines.append(f"{self.output}: {self.documents:,} of {self.records:,} documents ({share:.1%})")
        return "\n".join(lines)

    def _row(self, name: str, removed: dict[str, int], changed: int) -> tuple[str, str, str, str, str]:
        count = sum(removed.values())
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in Counter(removed).most_common(3))
        share = f"{count / max(1, self.records):.1%}"
        return name, f"{count:,}", share, f"{changed:,}" if changed else "", reasons


def finish_curation(work: CurateWork) -> None:
    """Write the report, and the manifest of a tokenised corpus. All shards exist by then."""
    shards = [orjson.loads(shard_path(work, shard).read_bytes()) for shard in range(work.shards)]
    parts = part_facts(work)
    report = _report(work, parts, Duplicates(**read_arrays(work.parts / "duplicates")), shards)
    quarantine = b"".join((work.parts / f"{name}.quarantine.jsonl").read_bytes() for name in parts)
    replace_file(work.output / QUARANTINE_FILE, quarantine, sync=True)
    _check(work, report)
    if work.tokenizer is not None:
        manifest = _manifest(work, shards, report)
        report.manifest = manifest_hash(manifest)
        write_manifest(work.output, manifest)
    replace_file(work.output / REPORT_FILE, orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2) + b"\n", sync=True)
    clear_unfinished_shards(work.output)
    shutil.rmtree(work.parts, ignore_errors=True)


def _report(
    work: CurateWork, parts: dict[str, CuratedFacts], duplicates: Duplicates, shards: list[dict[str, Any]]
) -> CurationReport:
    quarantined: Counter[str] = Counter()
    for facts in parts.values():
        quarantined.update(facts.quarantined)
    steps, compared = [], 0
    for label, step in work.part_options.steps:
        if step.compares_documents:
            entry = _comparison(work, label, duplicates, compared)
            compared += 1
        else:
            entry = _own_step(work, label, list(parts.values()))
        steps.append(entry)
    return CurationReport(
        output=str(work.output),
        records=sum(facts.records for facts in parts.values()),
        documents=sum(shard["documents"] for shard in shards),
        characters_read=sum(facts.characters_read for facts in parts.values()),
        characters_compared=sum(facts.characters for facts in parts.values()),
        quarantined=dict(sorted(quarantined.items())),
        steps=steps,
        shards=shards,
        sources=_sources(work, parts, duplicates),
        plan=work.plan.digest(),
    )


def _own_step(work: CurateWork, label: str, parts: list[CuratedFacts]) -> dict[str, Any]:
    removed: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    examples = []
    for facts in parts:
        removed.update({reason: counts[0] for reason, counts in facts.removed.get(label, {}).items()})
        for example in facts.examples:
            if example["step"] == label and shown[example["reason"]] < work.part_options.examples:
                shown[example["reason"]] += 1
                examples.append(example)
    changed = sum(facts.changed.get(label, 0) for facts in parts)
    return {"name": label, "removed": dict(sorted(removed.items())), "changed": changed, "examples": examples}


def _comparison(work: CurateWork, label: str, duplicates: Duplicates, number: int) -> dict[str, Any]:
    found = np.flatnonzero(duplicates.step == number)
    examples = []
    for place in found[: work.part_options.examples]:
        file, offset, text = _head(work, int(duplicates.documents[place]))
        kept_file, kept_offset, kept_text = _head(work, int(duplicates.kept[place]))
        kept = {"file": kept_file, "offset": kept_offset, "text": kept_text}
        examples.append(
            {"step": label, "reason": "duplicate", "file": file, "offset": offset, "text": text, "kept": kept}
        )
    return {
        "name": label,
        "removed": {"duplicate": len(found)} if len(found) else {},
        "changed": 0,
        "examples": examples,
    }


def _head(work: CurateWork, document: int) -> tuple[str, int, str]:
    parts = job_parts(work.parts)
    number = int(np.searchsorted(parts.firsts, document, side="right")) - 1
    return read_heads(work.parts, parts.names[number])[document - int(parts.firsts[number])]


def _sources(work: CurateWork, parts: dict[str, CuratedFacts], duplicates: Duplicates) -> list[dict[str, Any]]:
    """Return each input with its documents, without duplicates, and its quarantined records."""
    documents: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    first = 0
    for facts in parts.values():
        for file, count, faulty, _ in facts.files:
            low, high = np.searchsorted(duplicates.documents, [first, first + count])
            documents[file] += count - int(high - low)
            bad[file] += faulty
            first += count
    return [
        {
            "path": f.path,
            "bytes": f.size,
            "documents": documents[f.path],
            "quarantined": bad[f.path],
            "version": f.version or None,
        }
        for f in work.files
    ]


def _check(work: CurateWork, report: CurationReport) -> None:
    removed = sum(sum(step["removed"].values()) for step in report.steps)
    bad = sum(report.quarantined.values())
    if report.records != report.documents + removed + bad:
        raise RuntimeError(
            f"documents were lost: {report.records} in, {report.documents} out, {removed} removed, {bad} bad"
        )
    if not report.records:
        raise ArgosyError("data.bad-records", "the inputs hold no record", fix="give files that are not empty")
    if bad > work.pipeline.spec.max_bad * report.records or report.records == bad:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in report.quarantined.items())
        raise ArgosyError(
            "data.bad-records",
            f"{bad:,} of {report.records:,} records were quarantined ({kinds}), and max_bad is {work.pipeline.spec.max_bad:.2%}",
            fix=f"see {work.output / QUARANTINE_FILE}; is key {work.pipeline.spec.key} right?",
        )
    if not report.documents:
        most = max(report.steps, key=lambda step: sum(step["removed"].values()))
        raise ArgosyError(
            "data.bad-records",
            f"the steps removed all {removed:,} documents, {most['name']} the most of them: {sum(most['removed'].values()):,}",
            key="steps",
            value=most["name"],
            fix=f"change {most['name']}, then run it with --overwrite",
        )


def _manifest(work: CurateWork, shards: list[dict[str, Any]], report: CurationReport) -> Manifest:
    if work.tokenizer is None:
        raise RuntimeError("JSON lines have no manifest")
    facts = TokenizerFacts(
        fingerprint=work.tokenizer.fingerprint,
        vocab_size=work.tokenizer.vocab_size,
        eod_id=work.appended,
        file=work.tokenizer.stored()[0],
    )
    return Manifest(
        tokenizer=facts,
        append_eod=work.appended is not None,
        dtype=work.dtype.name,
        shards=[Shard(**shard) for shard in shards],
        sources=[Source(**source) for source in report.sources],
        quarantined=report.quarantined,
    )

"""The reports of `argosy data prepare`: the dry run, and the summary of a finished corpus."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from argosy.data.corpus.corpus_manifest import Manifest
from argosy.data.prepare.job import PrepareJob
from argosy.data.prepare.work import QUARANTINE_FILE, PrepareOptions, Work
from argosy.data.text.inputs import find_inputs
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError

_log = logging.getLogger(__name__)


def preview(inputs: Sequence[str], tokenizer: Tokenizer, output: Path, options: PrepareOptions) -> str:
    """Return the report of a dry run, after the checks that need no text."""
    work = Work(find_inputs(inputs, report=_log.info, as_text=options.as_text), tokenizer, output, options)
    eod = "no end-of-document token" if work.eod is None else f"id {work.eod} ends each document"
    lines = [f"{file.path}  {file.size:,} bytes" for file in work.files]
    total = sum(file.size for file in work.files)
    where = ", ".join(str(corpus) for corpus in work.corpora)
    lines.append(
        f"{len(work.files)} files, {total:,} bytes -> {where} ({options.shards} shards, {work.dtype.name} tokens)"
    )
    lines.append(f"tokenizer {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size:,} entries, {eod}")
    lines.append(f"engine    {PrepareJob(work).runner.engine_here()[1]}")
    return "\n".join(lines)


def describe(manifest: Manifest, output: Path) -> str:
    """Summarize a finished corpus in a few lines."""
    bad = sum(manifest.quarantined.values())
    seen = manifest.documents + bad
    shards = f", {len(manifest.shards)} shards" if len(manifest.shards) > 1 else ""
    lines = [f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype}{shards})"]
    lines.append(f"documents: {seen:,} in = {manifest.documents:,} out + {bad:,} quarantined")
    if bad:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in manifest.quarantined.items())
        lines.append(f"quarantined: {kinds}; see {output / QUARANTINE_FILE}")
    return "\n".join(lines)


def parse_share(text: str) -> float:
    """Parse a fraction written as `0.1%` or `0.001`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgosyError(
            "config.bad-value", "not a fraction between 0 and 1", key="--max-bad", value=text, fix="write 0.1% or 0.001"
        )
    return share

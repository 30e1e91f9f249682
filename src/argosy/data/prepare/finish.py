"""The end of a job: write the quarantine files and the manifests once every shard is finished.

Any machine may be the last, or several at once; all write the same bytes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import orjson

from argosy.data.chat.chat_template import TEMPLATE_FILE, ChatFormat
from argosy.data.corpus.corpus_manifest import (
    ChatFacts,
    Manifest,
    Shard,
    Source,
    TokenizerFacts,
    manifest_hash,
    read_manifest,
    write_manifest,
)
from argosy.data.prepare.join import shard_facts_path, shard_name
from argosy.data.prepare.parts import PartFacts
from argosy.data.prepare.work import PLAN_FILE, QUARANTINE_FILE, Work
from argosy.data.text.inputs import InputFile
from argosy.errors import ArgosyError
from argosy.files import clear_temporaries, replace_file


def finish(work: Work) -> dict[Path, Manifest] | None:
    """Write and return the manifest of each corpus. Return None if other machines' shards are missing."""
    paths = [shard_facts_path(work.parts, shard) for shard in range(work.options.shards)]
    try:
        documents = [orjson.loads(path.read_bytes()) for path in paths]
        quarantine = b"".join(path.with_suffix(".quarantine.jsonl").read_bytes() for path in paths)
    except FileNotFoundError:
        # A shard is missing, or another machine that finished at the same time has removed the parts.
        return read_manifests(work) if work.is_done() else None
    named = {part.pop("name"): part for document in documents for part in document["parts"]}
    facts = [PartFacts(**named[name]) for name in sorted(named)]
    quarantined: Counter[str] = sum((Counter(f.quarantined) for f in facts), Counter())
    for corpus in work.corpora:
        replace_file(corpus / QUARANTINE_FILE, quarantine)
    _check_bad(work, sum(f.documents for f in facts), quarantined)
    manifests = {}
    for key, corpus in enumerate(work.corpora):
        manifests[corpus] = Manifest(
            tokenizer=TokenizerFacts(
                fingerprint=work.tokenizer.fingerprint,
                vocab_size=work.tokenizer.vocab_size,
                eod_id=work.eod,
                file=work.tokenizer.stored()[0],
            ),
            append_eod=work.appended is not None,
            dtype=work.dtype.name,
            shards=[Shard(**document["shards"][key]) for document in documents],
            sources=_sources(work.files, facts),
            quarantined=dict(sorted(quarantined.items())),
            chat=None if work.options.chat is None else _chat_facts(work.options.chat),
        )
    if work.options.machines > 1:
        replace_file(work.output / PLAN_FILE, work.result_of(map(manifest_hash, manifests.values())).encode())
    for corpus, manifest in manifests.items():
        # Of several machines, another may be writing the same.
        if work.options.machines == 1:
            clear_temporaries(corpus)
        write_manifest(corpus, manifest)
    shutil.rmtree(work.parts, ignore_errors=True)
    return manifests


def read_manifests(work: Work) -> dict[Path, Manifest]:
    """Return the manifest of each corpus of a finished job."""
    return {corpus: read_manifest(corpus) for corpus in work.corpora}


def _chat_facts(format: ChatFormat) -> ChatFacts:
    digest = hashlib.sha256(format.template.encode()).hexdigest()
    return ChatFacts(template_sha256=digest, file=TEMPLATE_FILE, pairs=format.pairs)


def _sources(files: list[InputFile], facts: list[PartFacts]) -> list[Source]:
    documents: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    digests = {file.path: hashlib.blake2b(digest_size=16) for file in files}
    for part in facts:
        for file, (good, faulty, checksum) in part.files.items():
            documents[file] += good
            bad[file] += faulty
            digests[file].update(checksum.to_bytes(4, "big"))
    return [
        Source(
            path=f.path,
            bytes=f.size,
            documents=documents[f.path],
            quarantined=bad[f.path],
            version=f.version or None,
            content=digests[f.path].hexdigest(),
        )
        for f in files
    ]


def _check_bad(work: Work, good: int, quarantined: Counter[str]) -> None:
    bad, records = quarantined.total(), good + quarantined.total()
    allowed = work.options.max_bad
    if good and bad <= allowed * records:
        return
    share = bad / max(1, records)
    what = "no document could be used" if good == 0 else f"{share:.2%} is more than --max-bad {allowed:.2%}"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in quarantined.most_common())
    shutil.rmtree(work.parts, ignore_errors=True)
    for corpus in work.corpora:
        for shard in range(work.options.shards):
            for path in corpus.glob(f"{shard_name(shard)}.*"):
                path.unlink()
    if not records:
        raise ArgosyError("data.bad-records", "the inputs hold no record", fix="give files that are not empty")
    raise ArgosyError(
        "data.bad-records",
        f"{bad:,} of {records:,} records were quarantined ({kinds}): {what}",
        fix=f"see {work.corpora[0] / QUARANTINE_FILE}"
        + (f"; is --key {', '.join(work.options.keys)} right?" if work.options.chat is None else ""),
    )

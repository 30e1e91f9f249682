"""Faults of data and environment. All are refused at the start, before anything is allocated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from argosy.errors import EXIT_REFUSED
from data.object_server import FaultyServer, from_directory
from faults.bench import Bench, Outcome, Run


def _refused(run: Run, code: str, *named: str) -> Outcome:
    started = time.time()
    assert run.wait() == EXIT_REFUSED, run.said
    assert run.said.count(f"error[{code}]") == 1, run.said
    assert all(name in run.said for name in named), run.said
    assert not (run.root / "checkpoints").exists()
    return Outcome(f"refused, {code}", detected_s=time.time() - started)


def token_beyond_vocabulary(bench: Bench) -> Outcome:
    with bench.run("small-vocabulary", model={"vocab_size": 200}) as run:
        return _refused(run, "tokenizer.vocabulary", "200")


def other_tokenizer(bench: Bench) -> Outcome:
    from tokenizers import Tokenizer, models

    path = bench.root / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1}, [])).save(str(path))
    with bench.run("other-tokenizer", data={"tokenizer": str(path)}) as run:
        return _refused(run, "tokenizer.mismatch")


def _copied(bench: Bench, name: str) -> tuple[Path, dict[str, Any]]:
    corpus = bench.root / name
    shutil.copytree(bench.corpus, corpus)
    return next(iter(sorted(corpus.glob("*.bin")))), {"data": {"train": str(corpus)}}


def truncated_shard(bench: Bench) -> Outcome:
    shard, sections = _copied(bench, "truncated")
    shard.write_bytes(shard.read_bytes()[:-100])
    with bench.run("on-truncated", **sections) as run:
        return _refused(run, "data.bad-index", shard.name)


def damaged_shard(bench: Bench) -> Outcome:
    """Damage that no check at the start reads is found when its batch is read."""
    shard, sections = _copied(bench, "damaged")
    content = shard.read_bytes()
    # Swaps the bytes of every token.
    shard.write_bytes(content[1:] + content[:1])
    with bench.run("on-damaged", **sections) as run:
        started = time.time()
        assert run.wait() == EXIT_REFUSED, run.said
        assert run.said.count("error[tokenizer.vocabulary]") == 1
        assert "damaged or swapped" in run.said
        return Outcome("refused, tokenizer.vocabulary", detected_s=time.time() - started)


def swapped_corpus(bench: Bench) -> Outcome:
    """Other data under the path of a stopped run is reported, and not mixed into the run."""
    from argosy.data.prepare.job import prepare
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.tokenizer import ByteTokenizer

    text = bench.root / "other.jsonl"
    text.write_text('{"text": "other text altogether, and long enough for a sample or two"}\n' * 60)
    prepare([str(text)], ByteTokenizer(), bench.root / "other", PrepareOptions())
    with bench.goes_on("on-other", data={"train": str(bench.root / "other")}) as run:
        started = time.time()
        run.start("--nproc", "2")
        assert run.wait() == EXIT_REFUSED, run.said
        assert run.said.count("error[run.changed]") == 1
        return Outcome("refused, run.changed", detected_s=time.time() - started)


def wrong_world_size(bench: Bench) -> Outcome:
    with bench.run("wrong-world", ranks=3) as run:
        return _refused(run, "launch.world-size", "= 2 processes", "there are 3")


def wrong_environment(bench: Bench) -> Outcome:
    with bench.run(
        "wrong-environment", env={"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, ranks=0
    ) as run:
        return _refused(run, "launch.environment", "RANK is 2")


def bad_records(bench: Bench) -> Outcome:
    """Bad records are quarantined with position and reason. The rest is prepared, unless too many are bad."""
    good = b'{"text": "a record like any other"}'
    bad = [b'{"text": "broken', b'{"text": "\xff\xfe"}', b"\0" * 50, b'{"other": 1}', b'{"text": 7}']
    source = bench.root / "bad.jsonl"
    source.write_bytes(b"\n".join([good] * 50 + bad + [good] * 50) + b"\n")
    started = time.time()

    def prepare(to: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "argosy", "data", "prepare", source, "--output", bench.root / to]
        return subprocess.run(
            [*command, "--tokenizer", "bytes", *more], capture_output=True, text=True, check=False, cwd=bench.root
        )

    done = prepare("kept")
    assert done.returncode == 0, done.stderr
    aside = bench.root / "kept" / "quarantine.jsonl"
    rows = [json.loads(line) for line in aside.read_text().splitlines()]
    assert len(rows) == len(bad), rows
    assert prepare("strict", "--max-bad", "1%").returncode == EXIT_REFUSED
    return Outcome(f"{len(rows)} of 105 kept apart; refused at --max-bad 1%", detected_s=time.time() - started)


def failing_store(bench: Bench) -> Outcome:
    """A corpus in an object store that answers 20% of all requests wrongly, late or not at all."""
    server = FaultyServer(from_directory(bench.corpus.parent))
    server.at_random(0.2, seed=1)
    try:
        source = {"path": f"{server.url}/{bench.corpus.name}", "cache": str(bench.root / "cache")}
        with bench.run("on-a-failing-store", data={"train": [source]}) as run:
            assert run.wait() == 0, run.said
            assert server.faults
            assert run.result() == bench.undisturbed()
            return Outcome(f"{sum(server.faults.values())} bad answers, bit-equal", steps_lost=0)
    finally:
        server.close()


def cache_too_small(bench: Bench) -> Outcome:
    server = FaultyServer(from_directory(bench.corpus.parent))
    try:
        source = {"path": f"{server.url}/{bench.corpus.name}", "cache": str(bench.root / "small"), "cache_limit": "1kB"}
        with bench.run("on-a-small-cache", data={"train": [source]}) as run:
            return _refused(run, "config.arithmetic", "cache_limit")
    finally:
        server.close()

"""Faults of data and of what surrounds a run: all are refusals at the start, before anything is held."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from argosy.errors import EXIT_REFUSED
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
    """Bytes that no check at the start reads, found when a batch of them is."""
    shard, sections = _copied(bench, "damaged")
    content = shard.read_bytes()
    shard.write_bytes(content[1:] + content[:1])  # every token has its bytes the wrong way round
    with bench.run("on-damaged", **sections) as run:
        started = time.time()
        assert run.wait() == EXIT_REFUSED, run.said
        assert run.said.count("error[tokenizer.vocabulary]") == 1
        assert "damaged or swapped" in run.said
        return Outcome("refused, tokenizer.vocabulary", detected_s=time.time() - started)


def swapped_corpus(bench: Bench) -> Outcome:
    """Other data under the path of a run that was stopped: named, and not mixed into it."""
    from argosy.data.prepare.job import PrepareOptions, prepare
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

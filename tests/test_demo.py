"""`argosy demo` does what it promises, in a short form."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from argosy.record.jsonl import read_jsonl


def test_the_demo_trains_is_killed_resumes_and_learns(
    argosy: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    result = argosy("demo", "--seconds", 5, timeout=580)
    assert result.returncode == 0, result.stderr
    assert "killed at about step" in result.stdout
    assert "resuming from" in result.stdout
    loss = float(re.search(r"validation loss after step \d+: ([\d.]+)", result.stdout)[1])  # type: ignore[index]
    entropy = float(re.search(r"unigram entropy of the same text: +([\d.]+)", result.stdout)[1])  # type: ignore[index]
    assert loss < 8.0  # it has learned something: a uniform guess over 4,096 tokens costs 8.318
    assert entropy < 8.0
    events = [event["event"] for event in read_jsonl(tmp_path / "argosy-demo" / "runs" / "demo" / "events.jsonl")]
    assert "resume" in events
    assert events[-1] == "done"
    assert "Next:" in result.stdout

"""Failures in a worker process are reported as what they are: a refusal, a bug with its traceback, or a death by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.data.prepare.parts import PartName, PartOptions
from argosy.data.prepare.workers import EncoderSpec, Pool, Raised, WorkerFault, encoder_spec
from argosy.data.text.engines import EngineFault
from argosy.data.text.inputs import InputFile, local_input
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError

OPTIONS = PartOptions(("text",), True, False, 1 << 20)
SPEC = encoder_spec(ByteTokenizer(), None, eod=256)


@pytest.fixture
def file(tmp_path: Path) -> InputFile:
    (tmp_path / "in.jsonl").write_text('{"text": "some"}\n')
    return local_input(str(tmp_path / "in.jsonl"))


def first_part(tmp_path: Path, spec: EncoderSpec, file: InputFile, *, kill: bool = False) -> object:
    pool = Pool(1, tmp_path, spec, OPTIONS, sampled=[[file]])

    def tasks() -> Iterator[tuple[PartName, list[InputFile]]]:
        if kill:
            [process] = pool._processes.values()
            os.kill(process.pid, signal.SIGKILL)
        yield PartName(0, 0), [file]

    try:
        return next(pool.run(tasks()))
    finally:
        pool.close()


def test_a_bug_in_a_worker_comes_with_its_type_and_traceback(tmp_path: Path, file: InputFile) -> None:
    broken = replace(SPEC, content=b"\xff")
    with pytest.raises(WorkerFault) as fault:
        first_part(tmp_path, broken, file)
    assert "UnicodeDecodeError" in str(fault.value)
    assert "in make_maker" in str(fault.value)


def test_a_refusal_of_a_worker_keeps_its_code_and_fix(tmp_path: Path, file: InputFile) -> None:
    gone = replace(file, path=str(tmp_path / "gone.jsonl"))
    with pytest.raises(ArgosyError) as refusal:
        first_part(tmp_path, SPEC, gone)
    assert (refusal.value.code, gone.path in refusal.value.cause) == ("data.input-changed", True)


def test_only_a_worker_that_was_killed_is_said_to_be(tmp_path: Path, file: InputFile) -> None:
    with pytest.raises(ArgosyError) as refusal:
        first_part(tmp_path, SPEC, file, kill=True)
    assert refusal.value.code == "data.worker-died"
    assert "a worker died while making part 00000-000000: prepare-0 was killed (SIGKILL" in refusal.value.cause


def test_every_part_of_a_refusal_crosses() -> None:
    error = ArgosyError("data.bad-input", "cause", fix="fix", key="--key", value=5, origin="run.yaml")
    crossed = Raised.of(error).exception()
    assert str(crossed) == str(error).replace("= 5", "= '5'")
    assert isinstance(Raised.of(EngineFault("x")).exception(), WorkerFault)
    starved = Raised.of(MemoryError()).exception()
    assert isinstance(starved, ArgosyError)
    assert starved.code == "data.worker-died"

"""Make parts in this process or in a pool of processes, with the fastest tokenizer engine that passes its check.

The workers load their engine while this process encodes the test strings with the reference, so neither waits for the other. A
process that only distributes work loads no engine and opens no input, which keeps its memory small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from argosy.data.prepare.preview import SAMPLE_BYTES, sample_texts
from argosy.data.prepare.workers import EncoderSpec, Maker, PartRecipe, Pool, Task, Workers, encoder_spec, make_maker
from argosy.data.text.engines import Encode, Proof, choose_engine, likely_engine
from argosy.data.text.inputs import InputFile
from argosy.data.text.tokenizer import JsonTokenizer, Tokenizer

_log = logging.getLogger(__name__)

# Smaller inputs are prepared in this process: starting workers would take longer.
_INLINE_BYTES = 4 << 20
_PLACED = "tokenizers, the reference, which knows the characters of each token"


class SharedWork(Protocol):
    """What a job tells its workers, and how many there are."""

    files: list[InputFile]
    groups: list[list[InputFile]]
    parts: Path
    # The id that is appended to each document.
    appended: int | None

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def part_options(self) -> PartRecipe: ...

    @property
    def options(self) -> WorkerOptions: ...


class WorkerOptions(Protocol):
    """The options that say who does the work."""

    @property
    def workers(self) -> int: ...

    @property
    def machines(self) -> int: ...

    @property
    def cluster(self) -> str | None: ...


class PartRunner:
    """The context manager of the workers. Entering it starts them, so that they load while this process does other work."""

    def __init__(self, work: SharedWork) -> None:
        self.work, self.tokenizer = work, work.tokenizer
        # The approximate share of this machine.
        self.input_bytes = sum(file.size for file in work.files) / work.options.machines
        # The input groups from which the sample for the engine check is taken.
        self.sampled = work.groups
        self._open: Workers | None = None
        self._ready = False
        self._maker: Maker | None = None

    def __enter__(self) -> PartRunner:
        if self._is_pool:
            self._pool(None if self.tokenizer is None or self._places_tokens else likely_engine(self.tokenizer))
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[Any, Any]]:
        """Yield the names and facts of parts as they are finished."""
        if self._is_pool:
            yield from self._proven_workers().run(tasks)
            return
        if self._maker is None:
            encode, description = (None, "") if self.tokenizer is None else self.engine_here()
            self._report_fallback(encode is not None, description)
            spec, options = self._encoder_spec(None), self.work.part_options
            self._maker = make_maker(self.work.parts, spec, options, encode, self.tokenizer)
        for name, group in tasks:
            yield name, self._maker.make(name, group)

    def _proven_workers(self) -> Workers:
        """Return the workers, after the first call with the fastest engine that passes its check."""
        if self._open is None or not self._ready:
            self._ready = True
            if self.tokenizer is None or self._places_tokens:
                return self._pool(None)
            pool, description = choose_engine(self.tokenizer, self._proven_pool)
            self._report_fallback(pool is not None, description)
            return pool or self._pool(None)
        return self._open

    @property
    def _is_pool(self) -> bool:
        options = self.work.options
        return options.cluster is not None or (options.workers > 1 and self.input_bytes >= _INLINE_BYTES)

    @property
    def _places_tokens(self) -> bool:
        return self.work.part_options.places_tokens

    def engine_here(self) -> tuple[Encode | None, str]:
        """Return the engine for this process, or None for the reference, and a description of the choice."""
        if self._places_tokens:
            return None, _PLACED
        if self.tokenizer is None:
            return None, "no tokenizer"
        tokenizer = self.tokenizer
        if self.input_bytes < SAMPLE_BYTES and isinstance(self.tokenizer, JsonTokenizer):
            return None, "tokenizers, the reference: there is less text than the check of a faster engine needs"

        def proven(name: str) -> Encode:
            encode = encoder_spec(tokenizer, name, eod=self.work.appended).encoder()
            Proof.by(tokenizer, sample_texts(self.sampled, self.work.part_options)).check(encode)
            return encode

        return choose_engine(tokenizer, proven)

    def _proven_pool(self, engine: str) -> Workers:
        pool = self._pool(engine)
        if self.tokenizer is not None:
            pool.prove(self.tokenizer)
        return pool

    def _pool(self, engine: str | None) -> Workers:
        if self._open is None or self._open.engine != engine:
            self.__exit__()
            work, cluster = self.work, self.work.options.cluster
            spec = self._encoder_spec(engine)
            if cluster is None:
                self._open = Pool(work.options.workers, work.parts, spec, work.part_options, sampled=self.sampled)
            else:
                from argosy.data.prepare.ray_workers import RayWorkers

                self._open = RayWorkers(cluster, work.parts, spec, work.part_options, sampled=self.sampled)
        return self._open

    def _report_fallback(self, is_fast: bool, description: str) -> None:
        """Report a fallback to the reference, except for small inputs, and where there is no faster engine."""
        expected = self._places_tokens or not isinstance(self.tokenizer, JsonTokenizer)
        if not (is_fast or expected) and self.input_bytes >= SAMPLE_BYTES:
            _log.info("tokenizing with %s", description)

    def _encoder_spec(self, engine: str | None) -> EncoderSpec | None:
        return None if self.tokenizer is None else encoder_spec(self.tokenizer, engine, eod=self.work.appended)

"""Make parts in this process or in a pool of processes, with the fastest tokenizer engine that passes its check.

The workers load their engine while this process encodes the test strings with the reference, so neither waits for the other. A
process that only distributes work loads no engine and opens no input, which keeps its memory small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from argosy.data.prepare.parts import PartFacts, PartMaker, PartName
from argosy.data.prepare.preview import SAMPLE_BYTES, sample_texts
from argosy.data.prepare.work import Work
from argosy.data.prepare.workers import EncoderSpec, Pool, Task, documents_of, encoder_spec
from argosy.data.text.engines import Encode, Proof, choose_engine, likely_engine
from argosy.data.text.tokenizer import JsonTokenizer

_log = logging.getLogger(__name__)

# Smaller inputs are prepared in this process: starting workers would take longer.
_INLINE_BYTES = 4 << 20
_PLACED = "tokenizers, the reference, which knows the characters of each token"


class PartRunner:
    """The context manager of the workers. Entering it starts them, so that they load while this process does other work."""

    def __init__(self, work: Work) -> None:
        self.work, self.tokenizer = work, work.tokenizer
        # The approximate share of this machine.
        self.input_bytes = sum(file.size for file in work.files) / work.options.machines
        # The input groups from which the sample for the engine check is taken.
        self.sampled = work.groups
        self._open: Pool | None = None

    def __enter__(self) -> PartRunner:
        if self._is_pool:
            self._pool(None if self._places_tokens else likely_engine(self.tokenizer))
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[PartName, PartFacts]]:
        """Yield the parts as they are finished."""
        if self._is_pool:
            pool, description = None, _PLACED
            if not self._places_tokens:
                pool, description = choose_engine(self.tokenizer, self._proven_pool)
            self._report_fallback(pool is not None, description)
            yield from (pool or self._pool(None)).run(tasks)
            return
        encode, description = self.engine_here()
        self._report_fallback(encode is not None, description)
        work = self.work
        documents = documents_of(work.part_options, encode, work.appended, lambda: self.tokenizer)
        maker = PartMaker(work.parts, documents, self.tokenizer.vocab_size, work.part_options.keys)
        for name, group in tasks:
            yield name, maker.make(name, group)

    @property
    def _is_pool(self) -> bool:
        return self.work.options.workers > 1 and self.input_bytes >= _INLINE_BYTES

    @property
    def _places_tokens(self) -> bool:
        """True if documents need to know which characters each token came from."""
        return self.work.part_options.chat is not None

    def engine_here(self) -> tuple[Encode | None, str]:
        """Return the engine for this process, or None for the reference, and a description of the choice."""
        if self._places_tokens:
            return None, _PLACED
        if self.input_bytes < SAMPLE_BYTES and isinstance(self.tokenizer, JsonTokenizer):
            return None, "tokenizers, the reference: there is less text than the check of a faster engine needs"

        def proven(name: str) -> Encode:
            encode = self._encoder_spec(name).encoder()
            Proof.by(self.tokenizer, sample_texts(self.sampled, self.work.part_options)).check(encode)
            return encode

        return choose_engine(self.tokenizer, proven)

    def _proven_pool(self, engine: str) -> Pool:
        pool = self._pool(engine)
        pool.prove(self.tokenizer)
        return pool

    def _pool(self, engine: str | None) -> Pool:
        if self._open is None or self._open.engine != engine:
            self.__exit__()
            work, spec = self.work, self._encoder_spec(engine)
            self._open = Pool(work.options.workers, work.parts, spec, work.part_options, sampled=self.sampled)
        return self._open

    def _report_fallback(self, is_fast: bool, description: str) -> None:
        """Report a fallback to the reference, except for small inputs, and where there is no faster engine."""
        expected = self._places_tokens or not isinstance(self.tokenizer, JsonTokenizer)
        if not (is_fast or expected) and self.input_bytes >= SAMPLE_BYTES:
            _log.info("tokenizing with %s", description)

    def _encoder_spec(self, engine: str | None) -> EncoderSpec:
        return encoder_spec(self.tokenizer, engine, eod=self.work.appended)

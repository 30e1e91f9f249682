"""Who makes the parts: this process, or a pool of them, with the fastest engine that is proven here and now.

The workers load their engines while this process has the reference encode the proof, so that neither waits for the
other. A process that only hands out work neither loads an engine nor opens an input, which keeps it small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from argosy.data.prepare.parts import PartFacts, PartMaker, PartName
from argosy.data.prepare.preview import SAMPLE_BYTES, sample_texts
from argosy.data.prepare.work import Work
from argosy.data.prepare.workers import Pool, Recipe, Task, recipe_of
from argosy.data.text.engines import Encode, Proof, choose_engine, likely_engine
from argosy.data.text.tokenizer import JsonTokenizer

_INLINE_BYTES = 4 << 20  # less than this is not worth starting processes for


class Crew:
    """`with crew: … crew.run(tasks)`: entering it starts the workers, so that they load while there is other work."""

    def __init__(self, work: Work) -> None:
        self.work, self.tokenizer = work, work.tokenizer
        self.input_bytes = sum(file.size for file in work.files) / work.options.machines  # for this machine, about
        self.sampled = work.groups  # to prove an engine on
        self._open: Pool | None = None

    def __enter__(self) -> Crew:
        if self._is_pool:
            self._pool(likely_engine(self.tokenizer))
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[PartName, PartFacts]]:
        """The parts, as they are finished."""
        if self._is_pool:
            pool, said = choose_engine(self.tokenizer, self._proven_pool)
            self._announce(pool is not None, said)
            yield from (pool or self._pool(None)).run(tasks)
            return
        encode, said = self.engine_here()
        self._announce(encode is not None, said)
        work, vocab_size, encode = self.work, self.tokenizer.vocab_size, encode or self.tokenizer.encode
        maker = PartMaker(work.parts, encode, vocab_size, work.eod, work.part_options)
        for name, group in tasks:
            yield name, maker.make(name, group)

    @property
    def _is_pool(self) -> bool:
        return self.work.options.workers > 1 and self.input_bytes >= _INLINE_BYTES

    def engine_here(self) -> tuple[Encode | None, str]:
        """(the engine for this process, None for the reference; what was found, in words)"""
        if self.input_bytes < SAMPLE_BYTES and isinstance(self.tokenizer, JsonTokenizer):
            return None, "tokenizers, the reference: there is less text than a faster engine is proven on"

        def proven(name: str) -> Encode:
            encode = self._recipe(name).encoder()
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
            work, recipe = self.work, self._recipe(engine)
            self._open = Pool(work.options.workers, work.parts, recipe, work.part_options, sampled=self.sampled)
        return self._open

    def _announce(self, is_fast: bool, said: str) -> None:
        """A fall back is never silent; where there is little to do, or one engine only, it is none."""
        if not is_fast and isinstance(self.tokenizer, JsonTokenizer) and self.input_bytes >= SAMPLE_BYTES:
            print(f"note: tokenizing with {said}", file=sys.stderr)

    def _recipe(self, engine: str | None) -> Recipe:
        return recipe_of(self.tokenizer, engine, eod=self.work.eod)

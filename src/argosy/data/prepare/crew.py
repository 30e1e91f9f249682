"""Who makes the parts: this process, or a pool of them, with the fastest engine that is proven here and now.

The workers load their engines while this process has the reference encode the proof, so that neither waits for the
other; a process that only hands out work never loads an engine of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from argosy.data.prepare.parts import PartFacts, PartMaker, PartName, PartOptions
from argosy.data.prepare.workers import Pool, Recipe, recipe_of
from argosy.data.text.blocks import open_blocks
from argosy.data.text.engines import Encode, Proof, choose_engine, likely_engine
from argosy.data.text.inputs import InputFile
from argosy.data.text.records import Parser, texts_of
from argosy.data.text.tokenizer import JsonTokenizer, Tokenizer

_INLINE_BYTES = 4 << 20  # less than this is not worth starting processes for
_PROOF_BYTES = 200_000  # of the corpus, to prove an engine on; the reference is slow
_PROOF_GROUPS = 3  # inputs that sample is taken from


class Crew:
    """`with crew: … crew.run(names)`: entering it starts the workers, so that they load while there is other work."""

    def __init__(
        self,
        parts: Path,
        groups: list[list[InputFile]],
        tokenizer: Tokenizer,
        options: PartOptions,
        *,
        eod: int | None,
        workers: int,
        input_bytes: float,
    ) -> None:
        """`input_bytes`: how much of the inputs this machine is to read, about."""
        self.parts, self.groups, self.tokenizer, self.options = parts, groups, tokenizer, options
        self.eod, self.workers, self.input_bytes = eod, workers, input_bytes
        self._open: Pool | None = None

    def __enter__(self) -> Crew:
        if self._is_pool:
            self._pool(likely_engine(self.tokenizer))
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def run(self, names: Iterator[PartName]) -> Iterator[tuple[PartName, PartFacts]]:
        """The parts, as they are finished."""
        if self._is_pool:
            pool, said = choose_engine(self.tokenizer, self._proven_pool)
            self._announce(pool is not None, said)
            yield from (pool or self._pool(None)).run(names)
            return
        encode, said = self.engine_here()
        self._announce(encode is not None, said)
        vocab_size, encode = self.tokenizer.vocab_size, encode or self.tokenizer.encode
        maker = PartMaker(self.parts, self.groups, encode, vocab_size, self.eod, self.options)
        for name in names:
            yield name, maker.make(name)

    @property
    def _is_pool(self) -> bool:
        return self.workers > 1 and self.input_bytes >= _INLINE_BYTES

    def engine_here(self) -> tuple[Encode | None, str]:
        """(the engine for this process, None for the reference; what was found, in words)"""
        if self.input_bytes < _PROOF_BYTES:
            return None, "tokenizers, the reference: there is less text than a faster engine is proven on"
        proof = self._proof()

        def proven(name: str) -> Encode:
            encode = self._recipe(name).encoder()
            proof.check(encode)
            return encode

        return choose_engine(self.tokenizer, proven)

    def _proven_pool(self, engine: str) -> Pool:
        pool = self._pool(engine)
        pool.prove(self._proof())  # made while the workers load
        return pool

    def _pool(self, engine: str | None) -> Pool:
        if self._open is None or self._open.engine != engine:
            self.__exit__()
            self._open = Pool(self.workers, self.parts, self.groups, self._recipe(engine), self.options)
        return self._open

    def _announce(self, is_fast: bool, said: str) -> None:
        """A fall back is never silent; where there is little to do, or one engine only, it is none."""
        if not is_fast and isinstance(self.tokenizer, JsonTokenizer) and self.input_bytes >= _PROOF_BYTES:
            print(f"note: tokenizing with {said}", file=sys.stderr)

    def _recipe(self, engine: str | None) -> Recipe:
        return recipe_of(self.tokenizer, engine, eod=self.eod)

    def _proof(self) -> Proof:
        """From a little of the corpus: the start of the first inputs."""
        texts: list[str] = []
        size = 0
        for text in self._first_texts():
            texts.append(text[: _PROOF_BYTES // 10])
            size += len(texts[-1])
            if size > _PROOF_BYTES:
                break
        return Proof.by(self.tokenizer, texts)

    def _first_texts(self) -> Iterator[str]:
        key = self.options.key or ""
        for group in self.groups[:_PROOF_GROUPS]:
            blocks = open_blocks(group, block_bytes=1 << 16, lines=self.options.text_lines, column=key)
            yield from texts_of(blocks.block(0) or iter(()), Parser(None if group[0].is_text else key))

"""Text that the model writes while it trains (`log.samples`), one line of samples.jsonl for each prompt.

Nothing of it reaches the training numbers: the model is in evaluation mode, no gradients are kept, and tokens are drawn from a
generator of their own. All ranks run the same number of forward passes, because FSDP gathers parameters from all of them, and the
first rank writes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch

from argosy.checkpoint.source import inherited_start, inherited_vocabulary, known_rows, opens_with
from argosy.config.watching import SamplesSpec
from argosy.data.text.tokenizer import Tokenizer
from argosy.model.decoding import Sampling, generate
from argosy.model.kv_cache import CachedTexts
from argosy.record.heartbeat import Phase
from argosy.record.jsonl import JsonlWriter, now
from argosy.record.rundir import RunDir
from argosy.tasks.task_registry import task_of
from argosy.train.session import Session


class TextForm(NamedTuple):
    """What texts are made of: the number of tokens, the beginning-of-text token if there is one, and the tokens that begin every text."""

    vocabulary: int
    start: int | None
    opening: list[int]


def text_form(session: Session, run: RunDir, tokenizer: Tokenizer) -> TextForm:
    """Return what the texts of a run are made of. What its model began from is described on the first rank's file system."""
    mesh = session.mesh
    known = mesh.from_first(lambda: inherited_vocabulary(run.root))
    vocabulary = known_rows(session.spec.model, tokenizer, known, session.data.eod_id)
    # -1: the run did not begin from a model with such a token.
    start = mesh.from_first(lambda: -1 if (begins := inherited_start(run.root)) is None else begins)
    if start < 0:
        return TextForm(vocabulary, None, [])
    opens = mesh.from_first(lambda: opens_with(run.root, start, tokenizer))
    return TextForm(vocabulary, start, [start] if opens else [])


class TextSamples:
    """Writes samples of text when they are due."""

    phase: Phase = "write_samples"

    def __init__(self, session: Session, spec: SamplesSpec, run: RunDir, clock: Callable[[], float]) -> None:
        self._session, self._spec, self._file = session, spec, JsonlWriter(run.samples)
        self._timer = session.timer(spec.every, clock)
        self._task, self._eod = task_of(session.spec), session.data.eod_id
        self._tokenizer = session.data.require_tokenizer("log.samples")
        self._form = text_form(session, run, self._tokenizer)

    def due(self, step: int) -> bool:
        return step == self._session.steps or self._timer.due(step)

    def run(self, step: int, tokens: int) -> list[str]:
        """Continue each prompt with the weights after `step`. `tokens` is how many the run has consumed."""
        model = self._session.engine.model
        self._session.engine.make_room()
        model.eval()
        texts = self._continue()
        model.train()
        if self._session.mesh.is_first:
            for prompt, text in zip(self._spec.prompts, texts, strict=True):
                self._file.write({"step": step, "tokens": tokens, "time": now(), "prompt": prompt, "text": text})
        return []

    def close(self) -> None:
        self._file.close()

    def _continue(self) -> list[str]:
        """Return each prompt and its continuation, up to the end of the document."""
        spec, session = self._spec, self._session
        prompts = [self._tokenizer.encode(prompt) for prompt in spec.prompts]
        ids = [self._form.opening + prompt or [self._eod or 0] for prompt in prompts]
        texts = CachedTexts(
            session.engine.logits,
            limit=session.spec.data.seq_len,
            most=max(map(len, ids)) + spec.tokens,
            device=session.device,
            beside=lambda row, shown: self._task.prompt_inputs(len(ids[row]), shown),
            takes_cache=session.engine.takes_cache,
        )
        # Compiled code would be compiled again for each length.
        eager = session.spec.parallel.compile != "off"
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            # No stop token: the number of passes must not depend on what a rank has drawn.
            options = Sampling(spec.tokens, spec.temperature, spec.top_k)
            written = generate(texts, ids, options, stop=None, vocabulary=self._form.vocabulary)
        ends = [row.index(self._eod) if self._eod in row else None for row in written]
        rows = zip(prompts, written, ends, strict=True)
        return [self._tokenizer.decode(prompt + row[:end]) for prompt, row, end in rows]

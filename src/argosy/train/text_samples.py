"""Text that the model writes while it trains (`log.samples`), one line of samples.jsonl for each prompt.

Nothing of it reaches the training numbers: the model is in evaluation mode, no gradients are kept, and tokens are drawn from a
generator of their own. All ranks run the same number of forward passes, because FSDP gathers parameters from all of them, and the
first rank writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from argosy.config.watching import SamplesSpec
from argosy.model.decoding import Sampling, generate
from argosy.record.jsonl import JsonlWriter, now
from argosy.record.rundir import RunDir
from argosy.tasks.task_registry import task_of
from argosy.train.session import Session

# Forward passes have a multiple of this many tokens: matmuls in 8 bits need it, and compiled code sees fewer lengths.
_ALIGNMENT = 64


class TextSamples:
    """Writes samples of text when they are due."""

    def __init__(self, session: Session, spec: SamplesSpec, run: RunDir, clock: Callable[[], float]) -> None:
        self._session, self._spec, self._file = session, spec, JsonlWriter(run.samples)
        self._timer = session.timer(spec.every, clock)
        self._task, self._eod = task_of(session.spec), session.data.eod_id
        self._tokenizer = session.data.require_tokenizer("log.samples")

    def due(self, step: int) -> bool:
        return step == self._session.steps or self._timer.due(step)

    def write(self, step: int, tokens: int) -> None:
        """Continue each prompt with the weights after `step`. `tokens` is how many the run has consumed."""
        model = self._session.engine.model
        model.eval()
        for prompt in self._spec.prompts:
            text = self._continue(prompt)
            if self._session.mesh.is_first:
                self._file.write({"step": step, "tokens": tokens, "time": now(), "prompt": prompt, "text": text})
        model.train()

    def close(self) -> None:
        self._file.close()

    def _continue(self, prompt: str) -> str:
        """Return the prompt and its continuation, up to the end of the document."""
        spec, device = self._spec, self._session.device
        prompt_ids = self._tokenizer.encode(prompt)
        ids = prompt_ids or [self._eod or 0]
        # No stop token: the number of passes must not depend on what a rank has drawn.
        written = list(
            generate(
                self._forward,
                ids,
                Sampling(spec.tokens, spec.temperature, spec.top_k),
                limit=self._session.spec.data.seq_len,
                stop=None,
                device=device,
                beside=partial(self._task.prompt_inputs, len(ids)),
            )
        )
        if self._eod in written:
            written = written[: written.index(self._eod)]
        return self._tokenizer.decode(prompt_ids + written)

    @torch.no_grad()
    def _forward(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        """Return the logits of the tokens. The pass is padded at its end, which no token before it sees."""
        most, count = self._session.spec.data.seq_len, tokens.shape[1]
        compiled = self._session.spec.parallel.compile != "off"
        length = most if compiled else min(most, -(-count // _ALIGNMENT) * _ALIGNMENT)
        pad: Callable[[Tensor], Tensor] = lambda row: torch.nn.functional.pad(row, (0, length - count))  # noqa: E731
        logits: Tensor = self._session.engine.model(pad(tokens), **{name: pad(row) for name, row in inputs.items()})
        return logits[:, :count]

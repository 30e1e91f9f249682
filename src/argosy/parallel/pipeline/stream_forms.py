"""The shapes of the streams between pipeline stages. They follow from the layout, so that no stage has to send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from argosy.config.schema import ParallelSpec
from argosy.data.samples.windows import Batch
from argosy.parallel.pipeline.stage_cut import Stages
from argosy.parallel.pipeline.stage_messages import Form

# The last module of an encoder whose output a decoder reads.
_ENCODER_END = "encoder.norm"


@dataclass(frozen=True)
class StreamForms:
    """The residual stream of each sequence of a model, as a stage sends it for a micro-batch."""

    stages: Stages
    parallel: ParallelSpec
    hidden: int
    dtype: torch.dtype

    def leaving(self, stage: int, batch: Batch, samples: int) -> list[Form]:
        """Return the form of each tensor of the stream that leaves a stage, for `samples` samples of a batch."""
        lengths = [batch.tokens.shape[1]]
        lengths += [array.shape[1] for name, array in batch.inputs.items() if name == "decoder_tokens"]
        return self.leaving_of(stage, lengths, samples)

    def leaving_of(self, stage: int, lengths: Sequence[int], samples: int) -> list[Form]:
        """Return the same for sequences of these lengths."""
        parts = self.parallel.cp * (self.parallel.tp if self.parallel.sp else 1)
        shares = [length // parts for length in lengths]
        # The decoder reads the whole output of the encoder.
        if any(_ENCODER_END in modules for modules in self.stages.modules[: stage + 1]):
            shares[0] = lengths[0]
        return [Form((samples, share, self.hidden), self.dtype) for share in shares]

"""Preference tuning by DPO: a decoder learns to prefer the chosen of two answers, without moving far from the model it starts from.

The reference is the model of `init_from`. Its log-probabilities are computed once, by `argosy data reference`, so that training
holds no second model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from argosy.config.model import Section
from argosy.config.origins import Origins
from argosy.config.units import PositiveNumber
from argosy.errors import ArgosyError
from argosy.tasks.document_task import document_seed
from argosy.tasks.sft import ChatTask
from argosy.tasks.task import Opened, Run

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus, Split
    from argosy.data.samples.document_stream import DocumentSet
    from argosy.data.samples.windows import Batch


class DpoSpec(Section):
    """Direct preference optimisation on pairs made by `argosy data prepare --task dpo`."""

    beta: PositiveNumber = Field(0.1, description="how strongly the model is kept near the reference; larger: nearer")


class PreferenceTuning(ChatTask[DpoSpec]):
    name = "dpo"
    samples = "pairs of answers (data.dpo)"
    section = "dpo"
    settings_type = DpoSpec
    records = "preferences"
    predicts_tokens = False
    # Of the chosen and of the rejected answer.
    sample_losses = 2

    def check(self, run: Run, origins: Origins) -> None:
        super().check(run, origins)
        refused = {
            "parallel.cp": (run.parallel.cp > 1, "the two answers of a pair are compared as wholes, and cp cuts them"),
            "train.z_loss": (run.train.z_loss > 0, "the loss of a pair has no z-loss"),
        }
        for key, (asked, why) in refused.items():
            if asked:
                raise ArgosyError("config.conflict", why, key=key, origin=origins.get(key), fix=f"leave {key} out")

    def document_set(self, opened: Opened, corpus: Corpus, part: Split, number: int) -> DocumentSet:
        from argosy.data.samples.preferences import PreferenceRows, read_reference

        self.require_chat(corpus)
        run = opened.run
        return PreferenceRows(
            corpus,
            part,
            run.data.seq_len,
            run.model.vocab_size,
            document_seed(opened, part, number),
            beta=self.settings(run).beta,
            reference=read_reference(corpus, run.init_from),
        )

    def corpus_facts(self, corpus: Corpus) -> dict[str, Any]:
        from argosy.data.samples.preferences import reference_identity

        return reference_identity(corpus)

    def check_weights(self, corpora: Sequence[Corpus], identity: Callable[[], str]) -> None:
        from argosy.data.samples.preferences import require_reference_by

        weights = identity()
        for corpus in corpora:
            require_reference_by(corpus, weights)

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        """Return the two conversations of each row as a pair, of which the reference likes both alike."""
        import numpy as np

        batch = super().synthetic(run, draw)
        batch.inputs["preference"] = np.tile(
            np.array([self.settings(run).beta, 0.0], np.float32), (len(batch.tokens), 1)
        )
        return batch

"""Supervised fine-tuning: a decoder learns what the assistant wrote in conversations, and nothing of what others wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from argosy.config.model import Section
from argosy.errors import ArgosyError
from argosy.families.architecture import DECODER, Architecture
from argosy.tasks.document_task import DocumentTask, document_seed
from argosy.tasks.task import Opened, Run, S

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus, Split
    from argosy.data.samples.document_stream import DocumentSet
    from argosy.data.samples.windows import Batch


class SftSpec(Section):
    """Supervised fine-tuning on conversations made by `argosy data prepare --task sft`."""

    packing: bool = Field(
        True,
        description="put several conversations into one sample, each with an attention mask and positions of its own; "
        "false: one in each",
    )


class ChatTask(DocumentTask[S]):
    """A task whose documents are conversations."""

    architectures: ClassVar[tuple[Architecture, ...]] = (DECODER,)
    mask_inputs: ClassVar[tuple[str, ...]] = ("documents",)
    writes = "continuation"

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        """Return rows of two conversations of equal length, of which the second halves are learnt."""
        import numpy as np

        from argosy.data.samples.masks import IGNORED
        from argosy.data.samples.windows import Batch

        tokens, seq = draw(run.data.seq_len), run.data.seq_len
        half = max(1, seq // 2)
        places = np.broadcast_to(np.arange(seq), tokens.shape)
        labels = np.where(places % half >= half // 2, np.roll(tokens, -1, axis=1), IGNORED)
        labels[:, half - 1 :: half] = IGNORED
        return Batch(tokens, labels, {"documents": (places // half).astype(np.int32), "positions": places % half})

    def require_chat(self, corpus: Corpus) -> None:
        """Refuse a corpus that does not say which tokens are learnt."""
        chat = None if corpus.manifest is None else corpus.manifest.chat
        if chat is None or chat.pairs != (self.records == "preferences"):
            held = (
                "preferences" if chat is not None and chat.pairs else "conversations" if chat is not None else "texts"
            )
            raise ArgosyError(
                "data.wrong-task",
                f"{corpus.path} holds {held}, and {self.name} is trained on {self.records}",
                key="data.train",
                value=str(corpus.path),
                fix=f"prepare it with `argosy data prepare FILES --task {self.name}`, or choose another data.task",
            )


class SupervisedFineTuning(ChatTask[SftSpec]):
    name = "sft"
    samples = "conversations (data.sft)"
    section = "sft"
    settings_type = SftSpec
    records = "conversations"

    def document_set(self, opened: Opened, corpus: Corpus, part: Split, number: int) -> DocumentSet:
        from argosy.data.samples.conversations import ConversationRows

        self.require_chat(corpus)
        run = opened.run
        return ConversationRows(
            corpus,
            part,
            run.data.seq_len,
            run.model.vocab_size,
            document_seed(opened, part, number),
            packed=self.settings(run).packing,
        )

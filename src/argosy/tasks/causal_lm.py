"""Causal language modelling: a decoder predicts each next token of windows of the token stream.

A share of the training documents may be reordered for fill-in-the-middle (`data.fim`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from argosy.config.model import Section
from argosy.config.origins import Origins
from argosy.config.units import NotBool
from argosy.errors import ArgosyError
from argosy.families.architecture import DECODER, Architecture
from argosy.tasks.task import Opened, Run, S, Task

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus
    from argosy.data.samples.fim import FillInTheMiddle
    from argosy.data.samples.windows import Batch, Maker, Stream

Share = Annotated[float, Field(ge=0, le=1), NotBool]


class FimSpec(Section):
    """Fill-in-the-middle: some training documents are split into prefix, middle and suffix, and reordered (code models)."""

    rate: Share = Field(0.5, description="share of documents that are reordered")
    spm_rate: Share = Field(
        0.5, description="share of those in suffix-prefix-middle (SPM) order; the rest are in PSM order"
    )
    prefix: str = Field("<|fim_prefix|>", description="the token before the prefix")
    middle: str = Field("<|fim_middle|>", description="the token before the middle")
    suffix: str = Field("<|fim_suffix|>", description="the token before the suffix")


class WindowTask(Task[S]):
    """A task whose samples are windows of the token stream."""

    reads_windows = True
    architectures: ClassVar[tuple[Architecture, ...]] = (DECODER,)

    def check(self, run: Run, origins: Origins) -> None:
        if run.data.reset_positions and run.model.positions == "alibi" and not run.data.document_mask:
            raise ArgosyError(
                "config.conflict",
                "ALiBi knows the distance of two tokens and no positions, so that there is nothing to reset",
                key="data.reset_positions",
                value=True,
                origin=origins.get("data.reset_positions"),
                fix="data.document_mask=true, which keeps documents apart, or leave data.reset_positions out",
            )

    def stream(
        self, opened: Opened, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None, *, training: bool
    ) -> Stream:
        from argosy.data.samples.windows import SampleStream, Windows

        data, seed = opened.run.data, opened.run.train.seed
        maker = self.maker(opened, fim=training)
        if data.order == "megatron":
            return self._megatron(opened, split, corpora, weights, maker, training=training)
        sets = [Windows(corpus, corpus.split(data.split)[split], data.seq_len) for corpus in corpora]
        return SampleStream(sets, weights, seed, maker)

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        from argosy.data.samples.windows import Batch

        tokens = draw(run.data.seq_len)
        return Batch(tokens, draw(run.data.seq_len))

    def maker(self, opened: Opened, *, fim: bool) -> Maker:
        """Return the maker that turns windows into batches."""
        from argosy.data.samples.windows import BatchMaker

        data, eod = opened.run.data, opened.eod
        needs = [key for key in ("mask_eod", "document_mask", "reset_positions", "fim") if getattr(data, key)]
        if eod is None and needs:
            raise ArgosyError(
                "tokenizer.no-eod",
                "document boundaries are unknown: the data was prepared without an end-of-document token",
                key=f"data.{needs[0]}",
                fix="prepare the data with --append-eod, or leave the key out",
            )
        return BatchMaker(
            vocab_size=opened.run.model.vocab_size,
            seed=opened.run.train.seed,
            fim=_fill_in_the_middle(opened, data.fim, eod)
            if fim and data.fim is not None and eod is not None
            else None,
            masked_eod=eod if data.mask_eod else None,
            parting_eod=eod if data.document_mask else None,
            restarting_eod=eod if data.reset_positions else None,
        )

    def _megatron(
        self,
        opened: Opened,
        split: str,
        corpora: Sequence[Corpus],
        weights: Sequence[float] | None,
        maker: Maker,
        *,
        training: bool,
    ) -> Stream:
        """Return the samples in Megatron's order: those of the whole run in training, else one epoch.

        Megatron's order depends on the number of samples.
        """
        from argosy.data.samples.megatron_stream import MegatronStream, split_by_sequence

        data, train = opened.run.data, opened.run.train
        samples = None
        if training:
            tokens = (split_by_sequence(corpus, data.split)[split].tokens for corpus in corpora)
            epoch = sum(max(0, count - 1) // data.seq_len for count in tokens)
            steps = train.length.steps(train.batches, seq_len=data.seq_len, epoch_samples=epoch)
            samples = train.batches.samples(steps or 0)
        return MegatronStream(
            corpora,
            data.split,
            weights,
            seq_len=data.seq_len,
            num_samples=samples,
            seed=train.seed,
            maker=maker,
            split=split,
            cache_dir=None if data.order_cache is None else Path(data.order_cache),
        )


class CausalLM(WindowTask[Section]):
    name = "causal-lm"
    samples = "windows of the token stream"
    settings_type = Section
    writes = "continuation"


def _fill_in_the_middle(opened: Opened, fim: FimSpec, eod: int) -> FillInTheMiddle:
    from argosy.data.samples.fim import FillInTheMiddle

    ids = {}
    for role in ("prefix", "middle", "suffix"):
        found = None if opened.tokenizer is None else opened.tokenizer.id_of(getattr(fim, role))
        if found is None or found >= opened.run.model.vocab_size:
            raise ArgosyError(
                "tokenizer.vocabulary",
                f"the tokenizer has no token {getattr(fim, role)!r}, or its id is beyond the model's vocabulary",
                key=f"data.fim.{role}",
                value=getattr(fim, role),
                fix="name three special tokens of the tokenizer",
            )
        ids[role] = found
    return FillInTheMiddle(**ids, eod=eod, rate=fim.rate, spm_rate=fim.spm_rate)

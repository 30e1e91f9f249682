"""The interface of a training task.

`config/` reads a task's section and runs its checks. A task module therefore imports numpy and `argosy.data` only when it makes
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from argosy.config.model import ModelSpec, Section
from argosy.config.origins import Origins
from argosy.config.units import Whole
from argosy.errors import ArgosyError
from argosy.families.architecture import Architecture

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus
    from argosy.data.samples.windows import Batch, Stream
    from argosy.data.special import SpecialTokens
    from argosy.data.text.tokenizer import Tokenizer

# A token's name in the tokenizer, or its id. An id may be beyond the tokenizer's vocabulary.
SpecialToken = str | Whole
# Keys of `data` that apply only to windows of the token stream.
WINDOW_KEYS = ("order", "order_cache", "fim", "mask_eod", "document_mask", "reset_positions")


class Run(Protocol):
    """The part of a `RunSpec` that a task reads. Its `data` has the section of every task."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def data(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def parallel(self) -> Any: ...
    @property
    def init_from(self) -> str | None: ...


@dataclass(frozen=True)
class Opened:
    """The opened data of a run: its tokenizer and its end-of-document token, if there are any."""

    run: Run
    tokenizer: Tokenizer | None
    eod: int | None

    @property
    def special(self) -> SpecialTokens:
        from argosy.data.special import SpecialTokens

        return SpecialTokens(self.tokenizer, self.run.model.vocab_size)


S = TypeVar("S", bound=Section)


class Task(Generic[S]):
    """One task. `argosy.tasks.task_registry` lists them all.

    `samples` describes its samples in words. `section` is the key of `data` with its settings, of type `settings_type`, if it has
    any. `roles` are the settings that name special tokens. `reads_windows` is True if samples are windows of the token stream.
    `mask_inputs` are the inputs that make the attention mask depend on the batch; the tokens of one of its `documents` are contiguous. `records` says what `argosy data prepare` reads for it: texts,
    conversations, or preferences between two of them. `writes` says what `argosy sample` does with a trained model.
    """

    name: ClassVar[str]
    samples: ClassVar[str]
    architectures: ClassVar[tuple[Architecture, ...]]
    section: ClassVar[str | None] = None
    settings_type: type[S]
    roles: ClassVar[tuple[str, ...]] = ()
    reads_windows = False
    mask_inputs: ClassVar[tuple[str, ...]] = ()
    records: ClassVar[Literal["texts", "conversations", "preferences"]] = "texts"
    writes: ClassVar[Literal["continuation", "masks", "spans"] | None] = None

    # Whether the loss is that of predicting tokens, whose exponential is a perplexity.
    predicts_tokens: ClassVar[bool] = True
    # Losses that each sample has of its own. 0: a micro-batch has one.
    sample_losses: ClassVar[int] = 0

    @property
    def special_in_text(self) -> bool:
        """Whether the names of special tokens in a text stand for those tokens, as in the text of a chat template."""
        return self.records != "texts"

    def settings(self, run: Run) -> S:
        """Return the task's section, or its defaults."""
        found = None if self.section is None else getattr(run.data, self.section)
        return self.settings_type() if found is None else found

    def check(self, run: Run, origins: Origins) -> None:
        """Refuse keys that this task would ignore."""
        for key in () if self.reads_windows else WINDOW_KEYS:
            if getattr(run.data, key) != type(run.data).model_fields[key].default:
                raise ArgosyError(
                    "config.conflict",
                    f"data.{key} is for decoders, which read windows of the token stream; this model reads {self.samples}",
                    key=f"data.{key}",
                    value=str(getattr(run.data, key)),
                    origin=origins.get(f"data.{key}"),
                    fix="leave it out",
                )

    def other_lengths(self, run: Run) -> dict[str, int | None]:
        """Return the lengths of a sample's other sequences by key, None for a length that only the data determines."""
        return {}

    def target_len(self, run: Run) -> int | None:
        """Return the number of decoder tokens per sample for an encoder-decoder, else None."""
        return None

    def predicted_share(self, run: Run) -> float | None:
        """Return the share of the tokens that the output head runs on, None for that of the architecture."""
        return None

    def stream(
        self, opened: Opened, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None, *, training: bool
    ) -> Stream:
        """Return the samples of a split, blended by weights, or by size if there are none.

        Augmentations for training (fill-in-the-middle) apply only if `training`.
        """
        raise NotImplementedError

    def corpus_facts(self, corpus: Corpus) -> dict[str, Any]:
        """Return what the samples of a corpus depend on beside the corpus itself. A resumed run must find the same."""
        return {}

    def check_weights(self, corpora: Sequence[Corpus], identity: Callable[[], str]) -> None:
        """Refuse corpora that do not belong to the weights that a run starts from. `identity` returns a hash of the weights."""

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        """Return a batch of random tokens. `draw` returns rows of a given length."""
        raise NotImplementedError

    def example_prompt(self, run: Run) -> str | None:
        """Return a prompt for `argosy sample` that a model trained on this task can answer, None if it writes no text."""
        return None if self.writes is None else "Once upon a time"

    def prompt_inputs(self, prompt: int, shown: range) -> dict[str, list[int]]:
        """Return the model's inputs besides the tokens, for the positions `shown` of a text with a prompt of `prompt` tokens."""
        return {}

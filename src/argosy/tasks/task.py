"""What a task declares and does.

`config/` reads a task's section and runs its checks, so that a module of a task imports neither numpy nor `argosy.data` until it
makes samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from argosy.config.model import ModelSpec, Section
from argosy.config.units import Whole
from argosy.errors import ArgosyError
from argosy.families.architecture import Architecture

if TYPE_CHECKING:
    from argosy.data.corpus.corpus import Corpus
    from argosy.data.samples.windows import Batch, Stream
    from argosy.data.special import SpecialTokens
    from argosy.data.text.tokenizer import Tokenizer

Origins = dict[str, str]
# A token's name in the tokenizer, or its id. An id may be beyond the tokenizer's vocabulary.
SpecialToken = str | Whole
# Keys of `data` that only windows of the token stream have, with what they are where they are left out.
WINDOW_KEYS: dict[str, Any] = {
    "order": "argosy", "order_cache": None, "fim": None, "mask_eod": False, "document_mask": False, "reset_positions": False,
}  # fmt: skip


class Run(Protocol):
    """What a task reads of a `RunSpec`, whose `data` has the section of every task."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def data(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def parallel(self) -> Any: ...


@dataclass(frozen=True)
class Opened:
    """The opened data of a run: its tokenizer, and the token that ends documents, where there are such."""

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

    `section` is the key of `data` with its settings, of the type `settings_type`, where it has any. `roles` are the settings that
    name special tokens. `writes` says what `argosy sample` does with a trained model.
    """

    name: ClassVar[str]
    samples: ClassVar[str]  # in words
    architectures: ClassVar[tuple[Architecture, ...]]
    section: ClassVar[str | None] = None
    settings_type: type[S]
    roles: ClassVar[tuple[str, ...]] = ()
    reads_windows = False  # of the token stream
    masks_vary = False  # from sample to sample: who sees whom depends on the batch
    writes: ClassVar[Literal["continuation", "masks", "spans"] | None] = None

    def settings(self, run: Run) -> S:
        """Return the task's section, or its defaults."""
        found = None if self.section is None else getattr(run.data, self.section)
        return self.settings_type() if found is None else found

    def check(self, run: Run, origins: Origins) -> None:
        """Refuse keys that this task would ignore."""
        for key, default in () if self.reads_windows else WINDOW_KEYS.items():
            if getattr(run.data, key) != default:
                raise ArgosyError(
                    "config.conflict",
                    f"data.{key} is for decoders, which read windows of the token stream; this model reads {self.samples}",
                    key=f"data.{key}",
                    value=str(getattr(run.data, key)),
                    origin=origins.get(f"data.{key}"),
                    fix="leave it out",
                )

    def other_lengths(self, run: Run) -> dict[str, int | None]:
        """Return the lengths of a sample's further sequences by key; None where only the data tells."""
        return {}

    def target_len(self, run: Run) -> int | None:
        """Return the tokens of the decoder's side of a sample, where there are two sides."""
        return None

    def stream(
        self, opened: Opened, split: str, corpora: Sequence[Corpus], weights: Sequence[float] | None, *, training: bool
    ) -> Stream:
        """Return the samples of a split, blended by weights, or by size where there are none. What is drawn for training alone
        (fill-in-the-middle) is left out elsewhere."""
        raise NotImplementedError

    def synthetic(self, run: Run, draw: Callable[[int], Any]) -> Batch:
        """Return a batch of random tokens, of which `draw` makes rows of a length."""
        raise NotImplementedError

    def prompt_inputs(self, prompt: int, shown: range) -> dict[str, list[int]]:
        """Return what the model is given beside the tokens `shown` of a text whose first `prompt` were given."""
        return {}

"""A decoder of ours as a back end of lm-evaluation-harness: log-likelihoods and generation, in batches of similar length.

Context and continuation are tokenized, truncated and windowed as the harness's own Hugging Face back end does it, so an exported
model has the same scores there. On several ranks every rank gets all requests, computes a share of the batches, and receives the
answers of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from argosy.config.seeds import derive_seed
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.model.decoding import Sampling, generate
from argosy.model.kv_cache import CachedTexts
from argosy.parallel.failsafe import OutOfStepError, PassFailedError, pass_runner, run_pass
from argosy.parallel.host_group import all_gather_json
from argosy.parallel.mesh import Mesh

# Tokens to write if a task does not say, the default of the harness.
_TOKENS = 256
# The settings of a task's generation that `generate_until` knows.
_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
# Transformers' default.
_TOP_K = 50

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class TextModel:
    """A decoder in evaluation mode, with what it takes to score and to write text."""

    # A decoder, or a function that takes and returns the same.
    model: Callable[..., Tensor]
    tokenizer: Tokenizer
    device: torch.device
    # The most tokens that the model sees.
    limit: int
    # The rows of the vocabulary without padding.
    vocabulary: int
    # The token that ends a text.
    end: int
    # The token before a text without a context.
    start: int
    # The tokens with which every text begins.
    opening: list[int] = field(default_factory=list)
    # Returns the model's other inputs, given the number of tokens in the prompt and the positions shown.
    beside: Callable[[int, range], Mapping[str, list[int]]] = lambda prompt, shown: {}
    # Whether the model takes a key/value cache.
    takes_cache: bool = True


class _GivenUpError(ArgosyError):
    """A batch failed on some rank. All ranks raise this together."""


def _alone(document: Any) -> list[Any]:
    """Return the documents of a world of one rank."""
    return [document]


@dataclass(frozen=True)
class RankShare:
    """This rank's share of the batches. The default is one rank that computes all of them."""

    rank: int = 0
    ranks: int = 1
    # Returns the documents of all ranks.
    gather: Callable[[Any], list[Any]] = _alone
    # True if ranks with different batches wait for each other in a forward pass, as with FSDP: all then make equally many.
    in_step: bool = False
    # Runs a function that makes one forward pass, as `argosy.parallel.failsafe` has it.
    run_pass: Callable[[Callable[[], Tensor]], Tensor] = run_pass
    # Called after every batch that this rank has computed.
    after_batch: Callable[[], None] = lambda: None

    def run(self, batches: Sequence[list[Item]], compute: Callable[[list[Item]], list[T]]) -> list[list[T]]:
        """Return the results of every batch. Results must be JSON.

        Raises:
            ArgosyError: a batch failed on another rank or on this one. All ranks raise it together.
            OutOfStepError: a forward pass failed in which other ranks wait.
        """
        mine: list[tuple[int, list[T]]] = []
        failure: str | None = None
        rounds = -(-len(batches) // self.ranks)
        for number in range(self.rank, rounds * self.ranks, self.ranks):
            # A rank without a batch in the last round takes part with another, which does not count.
            counts = number < len(batches)
            if not counts and not self.in_step:
                break
            try:
                found = compute(batches[number if counts else 0])
            except (OutOfStepError, _GivenUpError):
                raise
            except Exception as error:
                if self.ranks == 1:
                    raise
                failure = str(error) if isinstance(error, PassFailedError) else f"{type(error).__name__}: {error}"
            if self.in_step:
                self._agree(True, failure)
            if failure is not None:
                break
            if counts:
                mine.append((number, found))
                self.after_batch()
        results = {int(number): part for said in self._agree(mine, failure) for number, part in said}
        return [results[number] for number in range(len(batches))]

    def all_finished(self, finished: bool) -> bool:
        """Return whether this rank may stop writing: if ranks wait for each other, only when all have finished."""
        return all(self._agree(finished, None)) if self.in_step else finished

    def _agree(self, value: Any, failure: str | None) -> list[Any]:
        """Return the values of all ranks. Raise on all ranks if one has failed.

        A rank that fails leaves what it does, and comes here next, where the others come after their pass.
        """
        said = self.gather([value, failure])
        for rank, (_, failed) in enumerate(said):
            if failed is not None:
                raise _GivenUpError(
                    "eval.bad-task",
                    f"a batch failed on rank {rank}: {failed}",
                    fix="score fewer texts at once (eval.tasks.batch) if memory ran out",
                )
        return [one for one, _ in said]


def rank_share(model: nn.Module, mesh: Mesh, after_batch: Callable[[], None] = lambda: None) -> RankShare:
    """Return this rank's share in the layout of a mesh: each data-parallel rank has some of the batches."""
    several, runner = mesh.data_ranks > 1, pass_runner(model, mesh)
    gather = all_gather_json if several else _alone
    return RankShare(mesh.data_rank, mesh.data_ranks, gather, several and mesh.has_fsdp, runner, after_batch)


class _Scored(NamedTuple):
    """One input of the model, and the requests whose continuations end it."""

    tokens: tuple[int, ...]
    # Tokens of the context, and those cut off before the input.
    prompt: int
    first: int
    # Number and continuation.
    requests: list[tuple[int, list[int]]]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """The back end. `batch` is the number of texts in a forward pass."""

    def __init__(self, text: TextModel, *, batch: int, share: RankShare | None = None) -> None:
        super().__init__()
        self._text, self._batch, self._share = text, batch, share or RankShare()

    @property
    def eot_token_id(self) -> int:
        return self._text.end

    @property
    def prefix_token_id(self) -> int:
        return self._text.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = self._text.tokenizer.encode(string)
        opening = [] if add_special_tokens is False else self._text.opening
        return ids if ids[: len(opening)] == opening else [*opening, *ids]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would write it."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether greedy decoding would write it."""
        inputs: dict[tuple[tuple[int, ...], int], _Scored] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self._text.limit:
                raise ArgosyError(
                    "eval.bad-task",
                    f"a continuation has {len(continuation)} tokens, and the model reads {self._text.limit}",
                    fix="leave the task out, or score a model with longer sequences",
                )
            whole = context + continuation
            first = max(0, len(whole) - self._text.limit - 1)
            tokens = tuple(whole[first:-1])
            # Continuations of one token after the same context need one pass.
            one = inputs.setdefault((tokens, len(context)), _Scored(tokens, len(context), first, []))
            one.requests.append((number, continuation))
        ordered = sorted(inputs.values(), key=lambda one: (-len(one.tokens), one.tokens))
        found = self._share.run(self._batches(ordered), self._score)
        # JSON has no NaN, which a diverged model gives: it arrives as None.
        scores = {n: (math.nan if value is None else value, greedy) for batch in found for n, value, greedy in batch}
        return [scores[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in disjoint windows of the model's length."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self._text.limit, context_len=1
            )
            pairs = [make_disjoint_window(window) for window in rolling]
            windows += [(None, context, continuation) for context, continuation in pairs]
            owners += [number] * len(pairs)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text written after each context, up to the first of the task's stop strings."""
        groups: dict[bytes, list[tuple[int, list[int]]]] = {}
        for number, request in enumerate(requests):
            context, settings = request.args
            key = orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)
            # Without a token there is nothing to continue.
            groups.setdefault(key, []).append((number, self.tok_encode(context) or [self.prefix_token_id]))
        texts: dict[int, str] = {}
        for key, group in groups.items():
            settings = _generation(orjson.loads(key), self._text.limit)
            ordered = sorted(group, key=lambda one: -len(one[1]))
            found = self._share.run(self._batches(ordered), partial(self._write, settings=settings))
            texts |= {number: text for batch in found for number, text in batch}
        return [texts[number] for number in range(len(requests))]

    def _batches(self, ordered: Sequence[Item]) -> list[list[Item]]:
        """Cut the requests, longest first, into batches. The first pass needs the most memory."""
        return [list(ordered[at : at + self._batch]) for at in range(0, len(ordered), self._batch)]

    @torch.no_grad()
    def _score(self, batch: list[_Scored]) -> list[tuple[int, float, bool]]:
        wanted: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        lengths: list[int] = []
        for row, one in enumerate(batch):
            end = row * len(batch[0].tokens) + len(one.tokens)
            most = max(len(continuation) for _, continuation in one.requests)
            wanted += range(end - most, end)
            for _, continuation in one.requests:
                rows += range(len(wanted) - len(continuation), len(wanted))
                targets += continuation
                lengths.append(len(continuation))
        logits = self._share.run_pass(partial(self._logits, batch, wanted))
        at, expected = self._tensor(rows), self._tensor(targets)
        scores = logits.log_softmax(-1)[at, expected].cpu().split(lengths)
        greedy = (logits.argmax(-1)[at] == expected).cpu().split(lengths)
        numbers = [number for one in batch for number, _ in one.requests]
        return [(n, float(s.sum()), bool(g.all())) for n, s, g in zip(numbers, scores, greedy, strict=True)]

    def _logits(self, batch: list[_Scored], wanted: list[int]) -> Tensor:
        """Return the logits of the tokens `wanted`, in one forward pass."""
        text, width = self._text, len(batch[0].tokens)
        # Padding comes after the text, where no token sees it.
        tokens = self._tensor([[*one.tokens, *[0] * (width - len(one.tokens))] for one in batch])
        others = [text.beside(one.prompt, range(one.first, one.first + width)) for one in batch]
        inputs = {name: self._tensor([other[name] for other in others]) for name in others[0]}
        return text.model(tokens, logits_at=self._tensor(wanted), **inputs)[:, : text.vocabulary].float()

    def _write(self, batch: list[tuple[int, list[int]]], settings: _Generation) -> list[tuple[int, str]]:
        text, options = self._text, settings.options
        prompts = [ids[-(text.limit - options.tokens) :] for _, ids in batch]
        cached = CachedTexts(
            text.model,
            limit=text.limit,
            most=len(prompts[0]) + options.tokens,
            device=text.device,
            beside=lambda row, shown: text.beside(len(prompts[row]), shown),
            takes_cache=text.takes_cache,
        )
        # Repeats of a request draw different texts.
        seeds = [derive_seed(options.seed, "sample", number) for number, _ in batch]
        written = generate(
            lambda texts: self._share.run_pass(lambda: cached(texts)),
            prompts,
            options,
            stop=text.end,
            vocabulary=text.vocabulary,
            ends=lambda row, tokens: self._has_stop(tokens, settings),
            seeds=seeds,
            all_finished=self._share.all_finished,
        )
        texts = [postprocess_generated_text(text.tokenizer.decode(tokens), settings.until, None) for tokens in written]
        return [(number, one) for (number, _), one in zip(batch, texts, strict=True)]

    def _has_stop(self, tokens: Sequence[int], settings: _Generation) -> bool:
        tail = self._text.tokenizer.decode(tokens[-settings.tail :])
        return any(stop in tail for stop in settings.until)

    def _tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self._text.device)


class _Generation(NamedTuple):
    options: Sampling
    until: list[str]

    @property
    def tail(self) -> int:
        """The number of last tokens that can hold a stop string: every token has at least one byte."""
        return max((len(stop.encode()) for stop in self.until), default=0) + 4


def _generation(settings: dict[str, Any], limit: int) -> _Generation:
    """Return the settings of a task's generation. Refuse what would be ignored."""
    known = dict(normalize_gen_kwargs(settings, _TOKENS))
    unknown = sorted(known.keys() - _SETTINGS)
    if unknown:
        raise ArgosyError(
            "eval.bad-task",
            f"a task sets {', '.join(unknown)} for its generation, and this back end knows {', '.join(sorted(_SETTINGS))}",
            key="generation_kwargs",
            fix="leave it out of the task's generation_kwargs",
        )
    tokens = known["max_gen_toks"]
    if tokens >= limit:
        raise ArgosyError(
            "eval.bad-task",
            f"a task writes up to {tokens} tokens, which leaves no room for its prompt in the model's {limit}",
            key="max_gen_toks",
            value=tokens,
            fix=f"set max_gen_toks in the task's generation_kwargs to fewer than {limit} (max_new_tokens in a file of "
            "--icl-tasks, tokens in eval.tasks.icl)",
        )
    temperature = float(known.get("temperature", 1.0)) if known["do_sample"] else 0.0
    options = Sampling(tokens, temperature, int(known.get("top_k", _TOP_K)), 0, float(known.get("top_p", 1.0)))
    return _Generation(options, [stop for stop in known["until"] if stop])

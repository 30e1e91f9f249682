"""`argosy sample`: generate text from prompts with the newest checkpoint of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from argosy.checkpoint.source import Source
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.infer.infill import fill_masks, write_spans
from argosy.infer.loading import Loaded, load_model
from argosy.infer.prompt_ids import encode_prompt, opening_ids
from argosy.infer.rank_loading import load_on_ranks
from argosy.model.decoding import Sampling, generate
from argosy.model.kv_cache import CachedTexts
from argosy.parallel.engine import Engine
from argosy.parallel.host_group import all_gather_json
from argosy.supervise.world import World
from argosy.tasks.task import Task
from argosy.tasks.task_registry import own_task, task_of

_log = logging.getLogger(__name__)


def sample(where: str, prompt: str, options: Sampling, device: str | None = None) -> str:
    """Load a model and return its output for a prompt."""
    return sample_batch(where, [prompt], options, device)[0]


def sample_batch(
    where: str,
    prompts: Sequence[str],
    options: Sampling,
    device: str | None = None,
    *,
    layout: Sequence[str] = (),
    world: World | None = None,
) -> list[str]:
    """Load a model and return its output for each prompt.

    Args:
        layout: keys of `parallel` by which the ranks of the world share the model, such as "tp=2". Default: tensor parallelism over all.
        world: the rank of this process. All ranks return the same. Default: one process.
    """
    prompts = [_utf8(prompt) for prompt in prompts]
    if world is None or world.size == 1:
        loaded = load_model(where, device=device, writes=True)
        return write_texts(loaded, source_tokenizer(loaded.source), prompts, options)
    # Replicas would write the same texts again.
    keys = ["dp_replicate=1", *(layout or [f"tp={world.size}"])]
    with load_on_ranks(where, keys, world, device) as (loaded, engine, _):
        return write_texts(loaded, source_tokenizer(loaded.source), prompts, options, engine=engine)


def write_texts(
    loaded: Loaded, tokenizer: Tokenizer, prompts: Sequence[str], options: Sampling, *, engine: Engine | None = None
) -> list[str]:
    """Return a model's output for each prompt: a decoder continues it, BERT fills in its masks, T5 writes the text of its spans.

    Args:
        engine: the engine of a model that several ranks share.
    """
    prompts = [_utf8(prompt) for prompt in prompts]
    task = own_task(loaded.source.model) if loaded.spec is None else task_of(loaded.spec)
    if task.writes is None:
        raise ArgosyError(
            "model.no-text",
            f"{loaded.source.where} is a retriever: it compares queries with blocks, and writes no text",
            key="model.retrieval",
            fix="`argosy eval` has its accuracy; sample from a decoder, a BERT or a T5",
        )
    if task.writes == "continuation":
        return _go_on(loaded, task, tokenizer, prompts, options, engine)
    if engine is not None:
        raise ArgosyError(
            "config.conflict",
            f"{loaded.source.where} is not a decoder: several ranks share decoders only",
            key="--nproc",
            fix="leave --nproc and --layout out",
        )
    fill = fill_masks if task.writes == "masks" else write_spans
    return [fill(loaded, tokenizer, prompt, options) for prompt in prompts]


def _go_on(
    loaded: Loaded,
    task: Task[Any],
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: Sampling,
    engine: Engine | None,
) -> list[str]:
    """Return each prompt and its continuation. All are written as one batch."""
    eod = loaded.source.eod_id
    prompt_ids = [encode_prompt(loaded.source, tokenizer, prompt) for prompt in prompts]
    opening = opening_ids(loaded.source, tokenizer)
    if not (opening or all(prompt_ids)) and eod is None:
        raise ArgosyError(
            "tokenizer.no-eod",
            "without an end-of-document token there is nothing to start from",
            key="--prompt",
            fix="give a --prompt",
        )
    # Without a prompt, start like a document.
    ids = [opening + own or [eod or 0] for own in prompt_ids]
    limit, longest = loaded.source.model.max_seq_len, max(map(len, ids))
    if longest > limit:
        _log.info("%s", f"of the prompt's {longest:,} tokens the model reads the last {limit:,}")
    texts = CachedTexts(
        loaded.model if engine is None else engine.logits,
        limit=limit,
        most=longest + options.tokens,
        device=loaded.device,
        beside=lambda row, shown: task.prompt_inputs(len(ids[row]), shown),
        takes_cache=engine is None or engine.takes_cache,
    )
    # FSDP needs the version counters of its parameters, which inference mode has not. `generate` computes no gradients.
    with torch.inference_mode(engine is None):
        written = generate(
            texts,
            ids,
            options,
            stop=eod,
            vocabulary=loaded.source.vocabulary(tokenizer),
            all_finished=_alone if engine is None else _agreed,
        )
    return [tokenizer.decode(own + more) for own, more in zip(prompt_ids, written, strict=True)]


def _alone(finished: bool) -> bool:
    return finished


def _agreed(finished: bool) -> bool:
    """Return whether all ranks have finished. A rank that stopped before the others would leave them waiting in the next pass."""
    return all(all_gather_json(finished))


def _utf8(prompt: str) -> str:
    """Return a prompt from the command line as text.

    In a locale whose encoding is not UTF-8, such as POSIX, Python keeps undecodable bytes as surrogates.
    """
    try:
        prompt.encode()
        return prompt
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(prompt).decode()
    except UnicodeError as error:
        wrong = (
            f"byte 0x{error.object[error.start]:02x} at {error.start}"
            if isinstance(error, UnicodeDecodeError)
            else error
        )
        raise ArgosyError(
            "config.bad-value",
            f"the prompt is not UTF-8 text: {wrong}",
            key="--prompt",
            fix="give UTF-8 text, as `iconv -t utf-8` makes it",
        ) from None


def source_tokenizer(source: Source) -> Tokenizer:
    """Return the tokenizer stored beside the weights."""
    found = source.tokenizer()
    if found is None:
        raise ArgosyError(
            "tokenizer.not-found",
            f"{source.root} keeps no tokenizer: a run on a bare .bin/.idx pair, or a model imported without one",
            key="data.tokenizer",
            fix="name the tokenizer in the run spec as data.tokenizer and run `argosy train` on it again; or put "
            f"tokenizer.json into {source.root}",
        )
    return found

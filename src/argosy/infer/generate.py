"""`argosy sample`: generate text from a prompt with the newest checkpoint of a run."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from argosy.checkpoint.source import Source
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.infer.infill import fill_masks, write_spans
from argosy.infer.loading import Loaded, load_model
from argosy.model.decoding import Sampling, generate
from argosy.tasks.task import Task
from argosy.tasks.task_registry import own_task, task_of

_log = logging.getLogger(__name__)


def sample(where: str, prompt: str, options: Sampling, device: str | None = None) -> str:
    """Load a model and return its output for a prompt."""
    prompt = _utf8(prompt)
    loaded = load_model(where, device=device)
    return write_text(loaded, source_tokenizer(loaded.source), prompt, options)


def write_text(loaded: Loaded, tokenizer: Tokenizer, prompt: str, options: Sampling) -> str:
    """Return a model's output for a prompt: a decoder continues it, BERT fills in its masks, T5 writes the text of its spans."""
    prompt = _utf8(prompt)
    task = own_task(loaded.source.model) if loaded.spec is None else task_of(loaded.spec)
    if task.writes is None:
        raise ArgosyError(
            "model.no-text",
            f"{loaded.source.where} is a retriever: it compares queries with blocks, and writes no text",
            key="model.retrieval",
            fix="`argosy eval` has its accuracy; sample from a decoder, a BERT or a T5",
        )
    if task.writes == "continuation":
        return _go_on(loaded, task, tokenizer, prompt, options)
    fill = fill_masks if task.writes == "masks" else write_spans
    return fill(loaded, tokenizer, prompt, options)


def _go_on(loaded: Loaded, task: Task[Any], tokenizer: Tokenizer, prompt: str, options: Sampling) -> str:
    """Return the prompt and its continuation."""
    eod = loaded.source.eod_id
    prompt_ids = tokenizer.encode(prompt)
    # Data of our own runs has no such opening tokens.
    opening = loaded.source.opening(tokenizer) if loaded.spec is None else []
    if not (opening or prompt_ids) and eod is None:
        raise ArgosyError(
            "tokenizer.no-eod",
            "without an end-of-document token there is nothing to start from",
            key="--prompt",
            fix="give a --prompt",
        )
    # Without a prompt, start like a document.
    ids = opening + prompt_ids or [eod or 0]
    limit = loaded.source.model.max_seq_len
    if len(ids) > limit:
        _log.info("%s", f"of the prompt's {len(ids):,} tokens the model reads the last {limit:,}")
    beside = partial(task.prompt_inputs, len(ids))
    written = list(generate(loaded.model, ids, options, limit=limit, stop=eod, device=loaded.device, beside=beside))
    return tokenizer.decode(prompt_ids + written)


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

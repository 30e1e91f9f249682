"""`argosy data train-tokenizer`: train a byte-level BPE on the good documents of the inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from argosy.data.text.inputs import find_inputs, group_inputs
from argosy.data.text.readers import all_texts
from argosy.data.text.tokenizer import load_tokenizer, train_bpe
from argosy.errors import ArgosyError
from argosy.files import replace_file

_log = logging.getLogger(__name__)


def train_tokenizer_on(
    inputs: Sequence[str], vocab_size: int, output: Path, keys: Sequence[str], *, overwrite: bool, as_text: bool = False
) -> str:
    """Train a BPE on the good documents of `inputs`, write it to `output`, and return a one-line summary."""
    if output.exists() and not overwrite:
        raise ArgosyError(
            "data.output-exists",
            f"{output} exists",
            key="--output",
            value=str(output),
            fix="choose another, or pass --overwrite",
        )

    files = find_inputs(inputs, report=_log.info, as_text=as_text)
    documents = all_texts(group_inputs(files, text_lines=False), keys)
    first = next(documents, None)
    if first is None:
        raise ArgosyError("data.bad-records", "no document could be used", fix=f"is --key {', '.join(keys)} right?")
    trained = train_bpe(chain([first], documents), vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, trained.encode())
    tokenizer = load_tokenizer(str(output))
    short = (
        f" (asked for {vocab_size:,}: the text has no more pairs to merge)" if tokenizer.vocab_size < vocab_size else ""
    )
    return f"{output}: {tokenizer.vocab_size:,} entries{short}, fingerprint {tokenizer.fingerprint[:12]}"

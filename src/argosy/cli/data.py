"""argosy data prepare | train-tokenizer"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="From text to tokens.", no_args_is_help=True)

Inputs = Annotated[list[Path], typer.Argument(help="Files (.jsonl, .txt) or directories that hold them.")]
Key = Annotated[str, typer.Option(help="The key of each JSON object that holds the text.")]


class TextUnit(StrEnum):
    file = "file"
    line = "line"


@app.command("prepare")
def prepare(
    inputs: Inputs,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, a directory that holds one, or `bytes`.")],
    output: Annotated[Path, typer.Option(help="The corpus directory to make.")],
    key: Key = "text",
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    eod: Annotated[str | None, typer.Option(help="Which token that is; default: found among the usual names.")] = None,
    txt_unit: Annotated[TextUnit, typer.Option(help="What one document is in a .txt file.")] = TextUnit.file,
    max_bad: Annotated[str, typer.Option(help="Refuse when more than this share of records is bad, as 0.1%.")] = "100%",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus that is already there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the inputs and the tokenizer's facts, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise text into a corpus that `argosy train` and Megatron-LM read (.bin/.idx).

    Records that cannot be used are counted and written to quarantine.jsonl with their file and byte offset.
    """
    from argosy.data.prepare import PrepareOptions, describe, parse_share, preview
    from argosy.data.prepare import prepare as run
    from argosy.data.tokenizer import load_tokenizer

    options = PrepareOptions(key, append_eod, txt_unit.value, parse_share(max_bad), overwrite)
    chosen = load_tokenizer(tokenizer, eod)
    if dry_run:
        print(preview(inputs, chosen, output, options))
        return
    manifest = run(inputs, chosen, output, options)
    print(manifest.model_dump_json(indent=2) if as_json else describe(manifest, output))


@app.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    vocab_size: Annotated[int, typer.Option(min=257, help="Entries, the end-of-document token included.")],
    output: Annotated[Path, typer.Option(help="The tokenizer.json to write.")],
    key: Key = "text",
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    from argosy.data.prepare import train_tokenizer_on

    print(train_tokenizer_on(inputs, vocab_size, output, key))

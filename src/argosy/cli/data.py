"""The `argosy data prepare` and `train-tokenizer` commands, and the group `argosy data`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli import data_build, data_corpus, data_curate, data_fetch, data_reference
from argosy.cli.arguments import new_output

app = typer.Typer(help="Fetch, curate and tokenise text; inspect and verify corpora.", no_args_is_help=True)
app.command("fetch")(data_fetch.fetch)
app.command("curate")(data_curate.curate)

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Files, globs or directories: .jsonl, .txt, each also as .zst, .gz or .xz, .parquet; local or s3://, gs://, az://, https://, hf://."
    ),
]
KEY_HELP = "The JSON key or column that holds the text; meta.body for a nested one."


class TextUnit(StrEnum):
    file = "file"
    line = "line"


class OtherKind(StrEnum):
    text = "text"


OtherFiles = Annotated[
    OtherKind | None,
    typer.Option(
        "--as",
        help="text: also read UTF-8 files of other kinds, such as .md, .html and .py, as they are.",
        show_choices=False,
    ),
]


@app.command("prepare")
def prepare(
    inputs: Inputs,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="tokenizer.json, SentencePiece .model, vocab.json beside merges.txt, their directory, `bytes`, or hf:NAME of the Hub, which is fetched once."
        ),
    ],
    output: Annotated[Path, typer.Option(callback=new_output, help="The corpus directory to make.")],
    key: Annotated[
        list[str],
        typer.Option(help=f"{KEY_HELP} If repeated, each key becomes a separate corpus, OUTPUT/KEY."),
    ] = ["text"],  # noqa: B006 - typer copies it
    shards: Annotated[int, typer.Option(min=1, help="Number of .bin/.idx pairs.")] = 1,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one for each core.")] = None,
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    eod: Annotated[
        str | None, typer.Option(help="The end-of-document token; default: found among the usual names.")
    ] = None,
    special_in_text: Annotated[
        bool, typer.Option("--special-in-text", help="Let text such as <|endoftext|> become the control token.")
    ] = False,
    txt_unit: Annotated[
        TextUnit,
        typer.Option(
            help="Whether a file or a line is one document in a .txt file. Validation holds back whole documents."
        ),
    ] = TextUnit.file,
    other_files: OtherFiles = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="The data.task to prepare for. sft: conversations as OpenAI messages, ShareGPT or Alpaca; dpo: pairs of chosen and rejected answers; default: text."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="For conversations: a Jinja file in place of the tokenizer's own chat template.")
    ] = None,
    shuffle: Annotated[int | None, typer.Option(help="Shuffle the documents of each shard with this seed.")] = None,
    shard_index: Annotated[
        int, typer.Option(min=0, help="This machine's number, if --shard-count machines divide the work.")
    ] = 0,
    shard_count: Annotated[int, typer.Option(min=1, help="Number of machines that divide the work.")] = 1,
    on: data_curate.Cluster = None,
    max_bad: Annotated[
        str, typer.Option(help="Refuse if more than this share of records is bad, for example 0.1%.")
    ] = "50%",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus that is already there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the inputs and describe the tokenizer, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise text into a corpus to train on.

    A corpus is pairs of .bin/.idx files, which Megatron-LM reads too, and a manifest.

    Memory use does not grow with the corpus. If it is killed, run it again to resume. Bad records are counted and written to
    quarantine.jsonl with their file and byte offset.

    With --task sft, records are conversations. The tokenizer's chat template turns them into text, and the corpus knows which
    tokens the assistant wrote.
    """
    import json
    import sys

    from argosy.data.chat.chat_template import format_for
    from argosy.data.prepare.job import prepare as run
    from argosy.data.prepare.prepare_report import describe, parse_share, preview
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.hub_names import on_hub
    from argosy.data.text.tokenizer import load_tokenizer
    from argosy.host_cores import available_cores
    from argosy.tasks.task_registry import named_task

    named_on_hub = on_hub(tokenizer)
    if named_on_hub is not None:
        from argosy.data.remote.hub_tokenizer import fetch_tokenizer

        # Standard output has the report, which may be JSON.
        print(fetch_tokenizer(named_on_hub), file=sys.stderr)
    chosen_task = named_task(task or "causal-lm", key="--task")
    chat = format_for(chosen_task, tokenizer, None if chat_template is None else str(chat_template))
    options = PrepareOptions(
        keys=tuple(key),
        append_eod=append_eod,
        text_lines=txt_unit is TextUnit.line,
        as_text=other_files is not None,
        max_bad=parse_share(max_bad),
        overwrite=overwrite,
        shards=shards,
        workers=workers or available_cores(),
        machine=shard_index,
        machines=shard_count,
        shuffle_seed=shuffle,
        chat=chat,
        cluster=on,
    )
    chosen = load_tokenizer(tokenizer, eod, special_in_text=special_in_text or chat is not None)
    if dry_run:
        print(preview(inputs, chosen, output, options))
        return
    made = run(inputs, chosen, output, options)
    if made is None:
        print(
            f"{output}: the shards of machine {shard_index} of {shard_count} are done; the last machine writes the manifest"
        )
    elif as_json:
        facts = {directory.name: manifest.model_dump(mode="json") for directory, manifest in made.items()}
        print(json.dumps(facts if len(facts) > 1 else facts.popitem()[1], indent=2))
    else:
        print("\n".join(describe(manifest, directory) for directory, manifest in made.items()))


@app.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    vocab_size: Annotated[int, typer.Option(min=257, help="Vocabulary size, with the end-of-document token.")],
    output: Annotated[Path, typer.Option(callback=new_output, help="The tokenizer.json to write.")],
    key: Annotated[
        list[str], typer.Option(help=f"{KEY_HELP} If repeated, the tokenizer is trained on the texts of all keys.")
    ] = ["text"],  # noqa: B006 - typer copies it
    other_files: OtherFiles = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer that is already there.")] = False,
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    from argosy.data.text.train_tokenizer import train_tokenizer_on

    as_text = other_files is not None
    print(train_tokenizer_on(inputs, vocab_size, output, key, overwrite=overwrite, as_text=as_text))


app.command("build")(data_build.build)
app.command("reference")(data_reference.reference)
app.command("inspect")(data_corpus.inspect)
app.command("verify")(data_corpus.verify)
app.command("merge")(data_corpus.merge)
app.command("convert")(data_corpus.convert)

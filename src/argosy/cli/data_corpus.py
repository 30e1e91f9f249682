"""The `argosy data inspect`, `verify`, `merge` and `convert` commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import local, new_output

Corpus = Annotated[
    Path,
    typer.Argument(callback=local, help="A corpus directory, a directory of .bin/.idx pairs, or one pair's prefix."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the inputs and say what would be made, write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is already there.")]


class Encoding(StrEnum):
    uint16 = "ndarray:uint16"
    int32 = "ndarray:int32"
    bytes = "bytes"


class TokenType(StrEnum):
    uint16 = "uint16"
    int32 = "int32"
    uint32 = "uint32"
    int64 = "int64"


def inspect(
    path: Corpus,
    tokenizer: Annotated[
        str | None, typer.Option(help="Decodes the documents shown; default: the one stored with the corpus.")
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Documents to hash for the estimate of duplicates.")] = 20_000,
    show: Annotated[int, typer.Option(min=0, help="Documents to show as text.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Describe a corpus.

    Shows counts, document lengths, vocabulary, duplicates, and a few documents as text.
    """
    import json

    from argosy.data.corpus.inspect import inspect as run

    facts = run(path, tokenizer=tokenizer, sample=sample, show=show)
    print(json.dumps(facts.as_dict()) if as_json else facts.describe())


def verify(
    path: Corpus,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Shards checked in parallel; default: one for each core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file of a corpus.

    Checks sizes, hashes, the index against the tokens, and token ids against the vocabulary.

    Lists all faults. The exit code is 2 if there is one.
    """
    import json

    from argosy.data.corpus.verify import verify as run
    from argosy.errors import EXIT_REFUSED
    from argosy.host_cores import available_cores

    report = run(path, workers=workers or available_cores())
    if as_json:
        print(json.dumps(report.as_dict()))
        raise typer.Exit(EXIT_REFUSED if report.faults else 0)
    print(report.describe(), flush=True)
    report.refuse_faults()


def merge(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            callback=local, help="Corpus directories, directories of pairs, or prefixes, in the order to merge."
        ),
    ],
    output: Annotated[
        Path, typer.Option(callback=new_output, help="The corpus directory to make, or the prefix of the pair.")
    ],
    pair: Annotated[
        bool | None,
        typer.Option(
            "--pair/--corpus", help="One .bin/.idx pair, or a corpus; default: a corpus if every input is one."
        ),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Merge corpora or Megatron pairs.

    The result is that of Megatron's merge_datasets.py.
    """
    import json

    from argosy.data.corpus.merge import merge as run

    merged = run(inputs, output, as_pair=pair, overwrite=overwrite, dry_run=dry_run)
    print(json.dumps(merged.as_dict()) if as_json else merged.describe())


def convert(
    source: Annotated[
        Path, typer.Argument(callback=local, help="An MDS directory (with index.json), a corpus, or a pair's prefix.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            callback=new_output, help="From MDS: the corpus directory or prefix to make. To MDS: the directory."
        ),
    ],
    column: Annotated[str, typer.Option(help="The MDS column that holds the tokens.")] = "tokens",
    bytes_dtype: Annotated[
        TokenType | None,
        typer.Option(
            help="The type of ids in a column of plain bytes, read or written; default: int64, as in llm-foundry."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="From MDS: the tokenizer of the ids; makes a corpus instead of a bare pair.")
    ] = None,
    eod: Annotated[str | None, typer.Option(help="From MDS: the tokenizer's end-of-document token.")] = None,
    encoding: Annotated[
        Encoding | None, typer.Option(help="To MDS: how tokens are stored; default: the width in the corpus.")
    ] = None,
    compression: Annotated[str | None, typer.Option(help="To MDS: zstd or zstd:LEVEL; default: none.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="To MDS: samples of this many tokens, as llm-foundry trains on.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert MosaicML's MDS to a corpus, or a corpus to MDS."""
    import json

    from argosy.data.corpus.convert import ConvertOptions
    from argosy.data.corpus.convert import convert as run

    options = ConvertOptions(
        column=column,
        bytes_dtype=bytes_dtype.value if bytes_dtype else None,
        tokenizer=tokenizer,
        eod=eod,
        encoding=encoding.value if encoding else None,
        compression=compression,
        seq_len=seq_len,
        overwrite=overwrite,
    )
    converted = run(source, output, options, dry_run=dry_run)
    print(json.dumps(converted.as_dict()) if as_json else converted.describe())

"""The `argosy data fetch` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import new_output


def fetch(
    names: Annotated[
        list[str],
        typer.Argument(
            help="slimpajama, c4, oscar; a Hugging Face data set as owner/name; hf://datasets/owner/name[@revision]/path, "
            "file or pattern; or an http(s) URL, with #sha256=… to check its hash."
        ),
    ],
    output: Annotated[Path, typer.Option(callback=new_output, help="The directory for the files.")],
    config: Annotated[
        str | None,
        typer.Option(help="Configuration (subset) of the data set; c4: default en; oscar: a language, such as de."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="train, validation, test, or several separated by commas; default: train. c4 also has train_small and val_small, "
            "the first file of train and of validation (356,000 and 45,600 documents)."
        ),
    ] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Only the first N files of each split, by name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the data set; default: main.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Files to fetch in parallel.")] = 4,
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Prepare a corpus as the files arrive; needs --tokenizer and --corpus."),
    ] = False,
    tokenizer: Annotated[str | None, typer.Option(help="With --prepare: as for `argosy data prepare`.")] = None,
    corpus: Annotated[
        Path | None, typer.Option(callback=new_output, help="With --prepare: the corpus directory to make.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="With --prepare: the key that holds the text; default: the data set's own.")
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="With --prepare: number of .bin/.idx pairs.")] = 1,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--discard", help="With --prepare: keep or delete files in --output once they are in the corpus."
        ),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --prepare: replace a corpus that is already there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and their size, fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fetch public data sets, or files by URL.

    After an interruption, run it again to resume; finished files are kept. Every file is checked against the hash its data
    set lists. For gated data sets set HF_TOKEN in the environment; HF_ENDPOINT names a mirror.
    """
    import json

    from argosy.data.remote.fetch import FetchOptions, corpus_wanted, preview
    from argosy.data.remote.fetch import fetch as run
    from argosy.data.remote.sources import Choice, text_key

    options = FetchOptions(Choice(config, split, revision, sample), workers)
    more = {"--key": key, "--shards": shards > 1, "--discard": not keep, "--overwrite": overwrite}
    wanted = corpus_wanted(prepare, tokenizer, corpus, more)
    if dry_run:
        plan = preview(names, output, options)
        print(json.dumps(plan.as_dict()) if as_json else plan.describe_plan())
        return
    if wanted is None:
        fetched = run(names, output, options)
        print(json.dumps(fetched.as_dict()) if as_json else fetched.describe())
        return

    from argosy.data.fetch_prepare import fetch_and_prepare
    from argosy.data.prepare.prepare_report import describe
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.tokenizer import load_tokenizer

    tokenizer_path, directory = wanted
    prepare_options = PrepareOptions(keys=(key or text_key(names),), shards=shards, overwrite=overwrite)
    chosen = load_tokenizer(tokenizer_path)
    fetched, manifest = fetch_and_prepare(names, output, options, chosen, directory, prepare_options, keep=keep)
    facts = {"fetch": fetched.as_dict(), "corpus": json.loads(manifest.model_dump_json())}
    print(json.dumps(facts) if as_json else f"{fetched.describe()}\n{describe(manifest, directory)}")

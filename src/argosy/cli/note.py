"""The `argosy note` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def note(
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/demo.", metavar="RUN")],
    text: Annotated[
        str | None, typer.Argument(help="The note, which replaces an earlier one.", metavar="[TEXT]")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="A tag to add; may be given several times.")] = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", help="A tag to remove.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a note and tags about a run, or show them.

    They are in notes.json in the run directory, and the dashboard shows, filters and edits them.
    """
    import json

    from argosy.record.run_notes import read_notes, write_notes
    from argosy.watch.run_list import require_run

    root = require_run(run).root
    before = read_notes(root)
    after = before.tagged(tag or (), untag or ())
    after = after if text is None else after.with_note(text)
    if after != before:
        write_notes(root, after)
    shown = "\n".join(part for part in (" ".join(after.tags), after.note) if part)
    print(json.dumps(after.as_dict()) if as_json else shown or "no tags and no note")

"""Notes and tags of a run: what is written comes back, and what cannot be kept is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.cli.note import note
from argosy.errors import ArgosyError
from argosy.record.run_notes import FILE, RunNotes, read_notes, write_notes
from record.run_dirs import make_run


def test_tags_and_a_note_are_kept_in_the_run_directory_and_changed_by_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs" / "sea").root
    note(run, "the one to beat", tag=["base", "2026"])
    assert capsys.readouterr().out == "base 2026\nthe one to beat\n"
    assert read_notes(run) == RunNotes(("base", "2026"), "the one to beat")
    note(run, untag=["2026"], tag=["base"], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"tags": ["base"], "note": "the one to beat"}


@pytest.mark.parametrize(
    "notes", [RunNotes(("",)), RunNotes(("a b",)), RunNotes(("x" * 41,)), RunNotes(("a\n",)), RunNotes(note="x" * 10_001), RunNotes(tuple(map(str, range(17))))]
)  # fmt: skip
def test_what_is_too_long_or_no_tag_is_refused_and_the_old_notes_stay(tmp_path: Path, notes: RunNotes) -> None:
    write_notes(tmp_path, RunNotes(("kept",)))
    with pytest.raises(ArgosyError) as refused:
        write_notes(tmp_path, notes)
    assert refused.value.code == "run.bad-note"
    assert read_notes(tmp_path) == RunNotes(("kept",))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"tags": 3, "note": []}', '{"tags": [1, null]}'])
def test_a_damaged_file_counts_as_no_notes(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_notes(tmp_path) == RunNotes()

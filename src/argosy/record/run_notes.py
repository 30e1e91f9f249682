"""What people write about a run: tags to filter by, and a note. `notes.json` in the run directory holds both.

Training neither reads nor writes the file. The last writer wins: it is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.untrusted import MIB, read_object

FILE = "notes.json"
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 16, 40, 10_000


@dataclass(frozen=True)
class RunNotes:
    tags: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def tagged(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> RunNotes:
        """Return the notes with tags added and removed. The order in which tags were added is kept."""
        gone = set(remove)
        return replace(self, tags=tuple(tag for tag in dict.fromkeys((*self.tags, *add)) if tag not in gone))

    def with_note(self, note: str) -> RunNotes:
        return replace(self, note=note)


def read_notes(root: Path) -> RunNotes:
    """Return the notes of a run. A missing or damaged file counts as empty."""
    try:
        found = read_object(root / FILE, MIB, within=root)
    except (OSError, ValueError):
        return RunNotes()
    tags, note = found.get("tags"), found.get("note")
    texts = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return RunNotes(tuple(texts[:MOST_TAGS]), note if isinstance(note, str) else "")


def write_notes(root: Path, notes: RunNotes) -> None:
    """Replace the notes of a run.

    Raises:
        ArgosyError: A tag or the note is too long, or the directory cannot be written.
    """
    for tag in notes.tags:
        if not 0 < len(tag) <= LONGEST_TAG or any(not letter.isprintable() or letter in " ," for letter in tag):
            raise _refused(
                f"{tag[: LONGEST_TAG + 1]!r} is not a tag",
                f"write 1 to {LONGEST_TAG} letters, digits or signs, without spaces and commas",
            )
    if len(notes.tags) > MOST_TAGS:
        raise _refused(f"{len(notes.tags)} tags are more than {MOST_TAGS}", f"keep at most {MOST_TAGS}")
    if len(notes.note) > LONGEST_NOTE:
        raise _refused(
            f"the note has {len(notes.note):,} characters", f"keep it within {LONGEST_NOTE:,}, and link to the rest"
        )
    try:
        replace_file(root / FILE, orjson.dumps(notes.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise ArgosyError(
            "run.unwritable",
            f"{root / FILE} cannot be written: {error.strerror or error}",
            fix="make the run directory writable for this user, or write the note as the user who trained it",
        ) from None


def _refused(cause: str, fix: str) -> ArgosyError:
    return ArgosyError("run.bad-note", cause, fix=fix)

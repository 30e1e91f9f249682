"""`argosy data fetch`: download public data sets and plain URLs to a directory that `argosy data prepare` reads.

    DIR/en/c4-train.00000-of-01024.json.gz   the files, under the names their data set gives them
    DIR/en/c4-train.00001….json.gz.partial   a file that is being downloaded
    DIR/.fetch.jsonl                         the journal: a line for each file begun or finished, with its hash

The journal is also the lock: one process per node downloads to the directory; others wait, and then find the work done.
Machines that divide the files have a journal each. A line is appended before a file gets its final name, so a kill at any
moment loses nothing: the next run keeps finished files, resumes partial ones, and ends with the same bytes. The journal is
JSON lines because a single JSON document would be rewritten for each of SlimPajama's 59,166 files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import orjson

from argosy.console.formats import volume
from argosy.console.progress_bar import ProgressBar
from argosy.data.remote.download import Download, explain, hash_file
from argosy.data.remote.hub import Hub, RemoteFile
from argosy.data.remote.sources import Choice, find_files
from argosy.data.remote.web import RETRY, TIMEOUT_S, BadStatus, Web, refuse
from argosy.errors import ArgosyError
from argosy.record.jsonl import read_jsonl
from argosy.retry import RetryPolicy

_log = logging.getLogger(__name__)
JOURNAL = ".fetch.jsonl"
PARTIAL = ".partial"


@dataclass(frozen=True)
class FetchOptions:
    """The options of `argosy data fetch`."""

    choice: Choice = field(default_factory=Choice)
    # Parallel downloads.
    workers: int = 4
    retry: RetryPolicy = RETRY
    # The number of this machine among `machines` that divide the files.
    machine: int = 0
    machines: int = 1
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class FetchedFile:
    """A downloaded or listed file."""

    path: str
    bytes: int
    # None if the file is only listed.
    sha256: str | None
    source: str


@dataclass(frozen=True)
class Fetched:
    """The result of `fetch`."""

    output: str
    files: list[FetchedFile]
    new_bytes: int

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"bytes": self.bytes}

    def describe(self) -> str:
        existing = self.bytes - self.new_bytes
        return f"{self.output}: {len(self.files):,} files, {self.bytes:,} bytes ({self.new_bytes:,} fetched, {existing:,} already there)"

    def describe_plan(self) -> str:
        """Return the output of a dry run."""
        lines = [f"{file.path}  {file.bytes:,} bytes" for file in self.files]
        total = f"{len(self.files):,} files, {self.bytes:,} bytes ({volume(self.bytes)}) -> {self.output}"
        return "\n".join(
            [*lines, f"{total}; {self.new_bytes:,} bytes still to fetch, {_free(Path(self.output)):,} free"]
        )


def fetch(names: Sequence[str], output: Path, options: FetchOptions) -> Fetched:
    """Download the missing files, and return all files of this machine in a fixed order."""
    name = f".fetch-{options.machine}-of-{options.machines}.jsonl" if options.machines > 1 else JOURNAL
    with FetchJournal(output, name) as journal:
        web = Web(options.retry, options.timeout_s)
        files = find_files(names, options.choice, web, _log.info)[options.machine :: options.machines]
        return FetchJob(web, files, output, journal).run(options.workers)


def preview(names: Sequence[str], output: Path, options: FetchOptions) -> Fetched:
    """Return what `fetch` would download, without writing anything."""
    files = find_files(names, options.choice, Web(options.retry, options.timeout_s), _log.info)
    listed = [FetchedFile(str(output / file.path), file.size, file.sha256, file.origin) for file in files]
    return Fetched(str(output), listed, sum(_missing_bytes(output, file) for file in files))


def corpus_wanted(
    prepare: bool, tokenizer: str | None, corpus: Path | None, more: Mapping[str, object]
) -> tuple[str, Path] | None:
    """Return the tokenizer and directory of the corpus to prepare, or None to only fetch. Refuse incomplete options.

    Args:
        prepare: The value of --prepare.
        tokenizer: The value of --tokenizer.
        corpus: The value of --corpus.
        more: Further options that need --prepare, with their values.
    """
    unused = [name for name, value in more.items() if value] if not prepare else []
    if unused:
        raise ArgosyError(
            "config.conflict",
            f"{' and '.join(unused)} without --prepare",
            key=unused[0],
            fix="add --prepare, or leave it out",
        )
    if prepare and tokenizer and corpus:
        return tokenizer, corpus
    if not prepare and tokenizer is None and corpus is None:
        return None
    given = {"--prepare": prepare, "--tokenizer": tokenizer, "--corpus": corpus}
    absent = [name for name, value in given.items() if not value]
    raise ArgosyError(
        "config.conflict",
        f"{' and '.join(name for name in given if name not in absent)} without {' and '.join(absent)}",
        key=absent[0],
        fix="give all three to prepare a corpus, or none to only fetch",
    )


class FetchJournal:
    """The journal of files begun and finished in a directory, and the lock on it. The kernel releases the lock with the process."""

    def __init__(self, output: Path, name: str = JOURNAL) -> None:
        self.path = output / name
        self.lines: dict[str, dict[str, Any]] = {}
        self._writing = threading.Lock()

    def __enter__(self) -> FetchJournal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another fetch is running in %s; waiting for it", self.path.parent)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        # A kill can truncate the last line. End it, so that the reader skips it.
        if (size := os.fstat(self._fd).st_size) and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        for line in read_jsonl(self.path):
            if isinstance(line.get("path"), str):
                self.lines[line["path"]] = line
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)

    def write(self, file: RemoteFile, *, sha256: str | None = None, mtime_ns: int = 0) -> None:
        """Append a line: the file is begun, or finished if `sha256` is given."""
        line = {"path": file.path, "origin": file.origin, "identity": file.identity, "size": file.size}
        if sha256 is not None:
            line |= {"sha256": sha256, "mtime_ns": mtime_ns}
        content = orjson.dumps(line) + b"\n"
        with self._writing:
            self.lines[file.path] = line
            if os.write(self._fd, content) < len(content):
                raise OSError(None, "the disk is full", str(self.path))


class Gate(Protocol):
    """The interface of a throttle that decides when a file may be downloaded."""

    def admit(self, file: RemoteFile) -> None:
        """Block until the file may be downloaded. Called in the thread that downloads it."""

    def shut(self) -> None:
        """Release all waiting threads, because the job ends."""


class FetchJob:
    """The downloads of one process."""

    def __init__(
        self,
        web: Web,
        files: list[RemoteFile],
        output: Path,
        journal: FetchJournal,
        gate: Gate | None = None,
    ) -> None:
        self.web, self.files, self.output, self.journal, self.gate = web, files, output, journal, gate
        self._progress: ProgressBar | None = None
        self._counting = threading.Lock()
        self._hashes: dict[str, str] = {}

    def run(self, workers: int) -> Fetched:
        """Download the missing files with `workers` parallel downloads, with a progress bar."""
        missing = self.missing()
        check_space(self.output, self.files, missing)
        with ProgressBar("fetch", sum(file.size for file in self.files), "B") as self._progress:
            self._advance(sum(file.size for file in self.files) - sum(file.size for file in missing))
            for _ in self.fetch_all(missing, workers):
                continue
        done = [FetchedFile(str(self.output / f.path), f.size, self._hashes[f.path], f.origin) for f in self.files]
        return Fetched(str(self.output), done, sum(file.size for file in missing))

    def missing(self) -> list[RemoteFile]:
        """Return the files that must be downloaded."""
        missing = []
        for file in self.files:
            if (known := self._kept(file)) is None:
                missing.append(file)
            else:
                self._hashes[file.path] = known
        return missing

    def fetch_all(self, files: list[RemoteFile], workers: int) -> Iterator[RemoteFile]:
        """Download files, and yield each one when it is finished."""
        with ThreadPoolExecutor(workers, "fetch") as pool:
            tasks = {pool.submit(self._fetch_one, file): file for file in files}
            try:
                for task in as_completed(tasks):
                    self._hashes[tasks[task].path] = task.result()
                    yield tasks[task]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                if self.gate is not None:
                    self.gate.shut()
                self.web.stop()
                raise

    def _fetch_one(self, file: RemoteFile) -> str:
        if self.gate is not None:
            self.gate.admit(file)
        target = self.output / file.path
        partial = target.with_name(target.name + PARTIAL)
        target.parent.mkdir(parents=True, exist_ok=True)
        begun = self.journal.lines.get(file.path, {})
        # The partial file may belong to another version of the file.
        if not file.has_hash and begun.get("identity") != file.identity:
            partial.unlink(missing_ok=True)
        if not file.has_hash:
            self.journal.write(file)
        try:
            sha256 = Download(self.web, file, partial, self._advance).run()
        except BadStatus as error:
            if file.on_hub:
                raise Hub(self.web).explain(error, file.origin.removeprefix("hf://datasets/")) from None
            raise explain(error) from None
        self.journal.write(file, sha256=sha256, mtime_ns=partial.stat().st_mtime_ns)
        os.replace(partial, target)
        return sha256

    def _kept(self, file: RemoteFile) -> str | None:
        """Return the sha256 of a file that need not be downloaded, else None.

        An existing file that is not in the journal is accepted if its hash is right. Otherwise it is refused, never overwritten.
        """
        target = self.output / file.path
        if not target.exists():
            return None
        line = self.journal.lines.get(file.path)
        if line is None:
            if file.has_hash and target.is_file() and target.stat().st_size == file.size:
                digest = hash_file(target, file)
                if digest.fault() is None:
                    self.journal.write(file, sha256=digest.sha256, mtime_ns=target.stat().st_mtime_ns)
                    return digest.sha256
            refuse(
                f"{target} exists, was not fetched by argosy, and differs", "move it away, or choose another --output"
            )
        if line["origin"] != file.origin:
            refuse(f"{target} was fetched from {line['origin']}, not {file.origin}", "choose another --output")
        facts = target.stat()
        if line["identity"] != file.identity or facts.st_size != file.size or not isinstance(line.get("sha256"), str):
            return None
        if line["mtime_ns"] != facts.st_mtime_ns and hash_file(target, file).sha256 != line["sha256"]:
            _log.info("%s has changed since it was fetched; fetching it again", target)
            return None
        return str(line["sha256"])

    def _advance(self, gained: int) -> None:
        with self._counting:
            if self._progress is not None:
                self._progress.advance(gained)


def check_space(output: Path, files: list[RemoteFile], missing: list[RemoteFile]) -> None:
    """Refuse a download that does not fit on the disk."""
    listed, wanted = sum(file.size for file in files), sum(_missing_bytes(output, file, anew=True) for file in missing)
    free = _free(output)
    if wanted > free:
        raise ArgosyError(
            "data.fetch-refused",
            f"{len(files):,} files of {listed:,} bytes, less {listed - wanted:,} already there, need {wanted:,} more;\n"
            f"{output} has {free:,} free: {wanted - free:,} too few",
            key="--output",
            value=str(output),
            fix="free some space, choose another directory, or take fewer files with --sample N",
        )


def _missing_bytes(output: Path, file: RemoteFile, *, anew: bool = False) -> int:
    target = output / file.path
    if not anew and target.is_file() and target.stat().st_size == file.size:
        return 0
    partial = target.with_name(target.name + PARTIAL)
    return max(0, file.size - (partial.stat().st_size if partial.is_file() else 0))


def _free(output: Path) -> int:
    nearest = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    return shutil.disk_usage(nearest).free

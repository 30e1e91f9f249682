"""`argosy data fetch --prepare`: each file is prepared as it arrives, so that neither network nor cores wait for the other.

The names and sizes of all files are known before the first byte comes, and they are all that decides how `prepare` cuts
the work. So this makes the corpus that fetching first would make, byte for byte, and goes on after a kill as both do: what
is fetched is kept, and so is each finished part. Without `keep` a file goes once all its parts are made, and files are
fetched only a little ahead of the one being prepared, so that the disk need not hold the whole data set.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from argosy.data.corpus.corpus_manifest import Manifest
from argosy.data.prepare.job import prepare_files
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.fetch import Books, Fetched, FetchedFile, FetchOptions, Job, check_space, note
from argosy.data.remote.hub import RemoteFile
from argosy.data.remote.sources import find_files
from argosy.data.remote.web import Stopped, Web
from argosy.data.text.inputs import InputFile, require_known
from argosy.data.text.tokenizer import Tokenizer

_AHEAD = 2  # files fetched ahead without `keep`, for each that is fetched at once
_FAREWELL_S = 10.0  # for downloads to notice that they are stopped


def fetch_and_prepare(
    names: Sequence[str],
    output: Path,
    options: FetchOptions,
    tokenizer: Tokenizer,
    corpus: Path,
    prepare_options: PrepareOptions,
    *,
    keep: bool = True,
) -> tuple[Fetched, Manifest]:
    """Fetch to `output` and make `corpus` of it at the same time."""
    web = Web(options.patience)
    files = find_files(names, options.choice, web, note)
    inputs = [InputFile(str(output / file.path), file.size, file.identity) for file in files]
    for file in inputs:
        require_known([file] if file.is_known else [], file.path)
    arriving = _Arriving(web, files, output, options.workers, keep=keep)
    try:
        made = prepare_files(inputs, tokenizer, corpus, prepare_options, arriving)
    finally:
        arriving.close()
    if made is None:
        raise RuntimeError("one machine makes all shards")
    [manifest] = made.values()
    return arriving.fetched(), manifest


class _Arriving:
    """The downloads, in a thread of their own; a file's path is how both sides know it."""

    def __init__(self, web: Web, files: list[RemoteFile], output: Path, workers: int, *, keep: bool) -> None:
        self.web, self.files, self.output, self.workers, self.keep = web, files, output, workers, keep
        self._change = threading.Condition()
        self._place: dict[str, int] = {}  # of each file that has to come
        self._reached = -1  # the place that may be fetched; those beyond wait
        self._there: set[str] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._hashes: dict[str, str] = {}
        self._new_bytes = 0
        self._thread = threading.Thread(target=self._run, name="argosy-fetch", daemon=True)

    def start(self, files: list[InputFile]) -> None:
        self._place = {file.path: place for place, file in enumerate(files)}
        self._thread.start()

    def wait(self, group: list[InputFile]) -> None:
        paths = {file.path for file in group}
        with self._change:
            self._reached = max(self._reached, *(self._place[path] + _AHEAD * self.workers for path in paths))
            self._change.notify_all()
            while not paths <= self._there and self._failure is None:
                self._change.wait()
            if not paths <= self._there and self._failure is not None:
                raise self._failure

    def release(self, group: list[InputFile]) -> None:
        if not self.keep:
            for file in group:
                Path(file.path).unlink(missing_ok=True)

    def admit(self, file: RemoteFile) -> None:
        """A file waits until the one being prepared is near."""
        place = self._place[self._path(file)]
        with self._change:
            while place > self._reached and not self._closed:
                self._change.wait()
            if self._closed:
                raise Stopped

    def shut(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()

    def close(self) -> None:
        """End the downloads; when all is there, they have ended."""
        self.shut()
        if self._thread.is_alive():
            if self._failure is None and len(self._there) < len(self._place):
                self.web.stop()
            self._thread.join(_FAREWELL_S)

    def fetched(self) -> Fetched:
        listed = [
            FetchedFile(str(self.output / file.path), file.size, self._hashes.get(file.path), file.origin)
            for file in self.files
        ]
        return Fetched(str(self.output), listed, self._new_bytes)

    def _run(self) -> None:
        try:
            with Books(self.output) as books:
                wanted = [file for file in self.files if self._path(file) in self._place]
                job = Job(self.web, wanted, self.output, books, gate=None if self.keep else self)
                missing = job.missing()
                if self.keep:
                    check_space(self.output, wanted, missing)
                self._arrived({self._path(file) for file in wanted} - {self._path(file) for file in missing})
                for file in job.fetch_all(missing, self.workers):
                    self._new_bytes += file.size
                    self._arrived({self._path(file)})
                self._hashes = {path: str(line["sha256"]) for path, line in books.lines.items() if "sha256" in line}
        except BaseException as error:  # noqa: BLE001 - raised where the file is waited for
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _path(self, file: RemoteFile) -> str:
        return str(self.output / file.path)

    def _arrived(self, paths: set[str]) -> None:
        with self._change:
            self._there |= paths
            self._change.notify_all()

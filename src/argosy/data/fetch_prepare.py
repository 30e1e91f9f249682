"""`argosy data fetch --prepare`: download and tokenize in parallel. Each file is prepared as soon as it is downloaded.

`prepare` partitions the work by file names and sizes only, and those are known before the first download starts. So the
corpus equals that of fetching first, byte for byte. After a kill both halves resume: downloaded files and finished parts are
kept. Without `keep`, a file is deleted once all its parts are finished, and downloads run only a few files ahead of
preparation, so the disk need not hold the whole data set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from argosy.data.corpus.corpus_manifest import Manifest
from argosy.data.prepare.job import prepare_files
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.fetch import Fetched, FetchedFile, FetchJob, FetchJournal, FetchOptions, check_space
from argosy.data.remote.hub import RemoteFile
from argosy.data.remote.sources import find_files
from argosy.data.remote.web import Stopped, Web
from argosy.data.text.inputs import InputFile, require_known
from argosy.data.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
# Without `keep`: files downloaded ahead of preparation, per parallel download.
_PREFETCH_FILES = 2
# How long `close` waits for running downloads to stop.
_JOIN_TIMEOUT_S = 10.0


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
    """Download the data sets `names` to `output` and prepare them as `corpus` at the same time.

    Args:
        names: Data sets, as `argosy data fetch` takes them.
        output: The directory for the downloaded files.
        options: The download options.
        tokenizer: The tokenizer of the corpus.
        corpus: The directory of the corpus.
        prepare_options: The options of `argosy data prepare`.
        keep: Keep the downloaded files. Otherwise each file is deleted once it is prepared.
    """
    web = Web(options.retry, options.timeout_s)
    files = find_files(names, options.choice, web, _log.info)
    inputs = [InputFile(str(output / file.path), file.size, file.identity) for file in files]
    for file in inputs:
        require_known([file] if file.is_known else [], file.path)
    downloads = _Downloads(web, files, output, options.workers, keep=keep)
    try:
        made = prepare_files(inputs, tokenizer, corpus, prepare_options, downloads)
    finally:
        downloads.close()
    if made is None:
        raise RuntimeError("one machine makes all shards")
    [manifest] = made.values()
    return downloads.fetched(), manifest


class _Downloads:
    """The download thread. Downloader and preparation both identify a file by its path."""

    def __init__(self, web: Web, files: list[RemoteFile], output: Path, workers: int, *, keep: bool) -> None:
        self.web, self.files, self.output, self.workers, self.keep = web, files, output, workers, keep
        self._change = threading.Condition()
        # The position of each file in the order of preparation.
        self._place: dict[str, int] = {}
        # The last position that may be downloaded now; files beyond it wait.
        self._reached = -1
        self._downloaded: set[str] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._hashes: dict[str, str] = {}
        self._new_bytes = 0
        self._thread = threading.Thread(target=self._run, name="argosy-fetch", daemon=True)

    def start(self, files: list[InputFile]) -> None:
        """Start downloading `files`, which are in the order of preparation."""
        self._place = {file.path: place for place, file in enumerate(files)}
        self._thread.start()

    def wait(self, group: list[InputFile]) -> None:
        """Block until all files of `group` are downloaded. Raise the failure of the download thread."""
        paths = {file.path for file in group}
        with self._change:
            self._reached = max(self._reached, *(self._place[path] + _PREFETCH_FILES * self.workers for path in paths))
            self._change.notify_all()
            while not paths <= self._downloaded and self._failure is None:
                self._change.wait()
            if not paths <= self._downloaded and self._failure is not None:
                raise self._failure

    def release(self, group: list[InputFile]) -> None:
        """Delete the files of `group`, which are prepared, unless `keep` is set."""
        if not self.keep:
            for file in group:
                Path(file.path).unlink(missing_ok=True)

    def admit(self, file: RemoteFile) -> None:
        """Block the download of `file` until preparation is at most `_PREFETCH_FILES` files per worker behind it."""
        place = self._place[self._path(file)]
        with self._change:
            while place > self._reached and not self._closed:
                self._change.wait()
            if self._closed:
                raise Stopped

    def shut(self) -> None:
        """Stop all downloads that wait in `admit`."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def close(self) -> None:
        """Stop the download thread. Running transfers are aborted only if files are still missing."""
        self.shut()
        if self._thread.is_alive():
            if self._failure is None and len(self._downloaded) < len(self._place):
                self.web.stop()
            self._thread.join(_JOIN_TIMEOUT_S)

    def fetched(self) -> Fetched:
        """Return the report of the downloads."""
        listed = [
            FetchedFile(str(self.output / file.path), file.size, self._hashes.get(file.path), file.origin)
            for file in self.files
        ]
        return Fetched(str(self.output), listed, self._new_bytes)

    def _run(self) -> None:
        try:
            with FetchJournal(self.output) as journal:
                wanted = [file for file in self.files if self._path(file) in self._place]
                job = FetchJob(self.web, wanted, self.output, journal, gate=None if self.keep else self)
                missing = job.missing()
                if self.keep:
                    check_space(self.output, wanted, missing)
                self._arrived({self._path(file) for file in wanted} - {self._path(file) for file in missing})
                for file in job.fetch_all(missing, self.workers):
                    self._new_bytes += file.size
                    self._arrived({self._path(file)})
                self._hashes = {path: str(line["sha256"]) for path, line in journal.lines.items() if "sha256" in line}
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _path(self, file: RemoteFile) -> str:
        return str(self.output / file.path)

    def _arrived(self, paths: set[str]) -> None:
        with self._change:
            self._downloaded |= paths
            self._change.notify_all()

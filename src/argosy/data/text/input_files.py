"""Read input files, and refuse an input that changed since the job was planned.

A job reads an input in many blocks, from many processes, over hours, and again after a kill. If the input changed meanwhile,
the corpus would match neither version. So a short read is refused, and so is an input whose size, modification time, inode or
ETag has changed when a part is finished.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, cast

from argosy.data.text.inputs import InputFile, local_input
from argosy.errors import ArgosyError
from argosy.files import may_pass

LINE_BUFFER = 1 << 20
# The size of a range request to a remote input: smaller requests cost round trips, larger ones cost memory.
REMOTE_BUFFER = 8 << 20  # bytes


def open_input(file: InputFile, buffer: int | None = None) -> io.BufferedReader:
    """Open the stored (possibly compressed) bytes of an input as a seekable stream.

    Raises:
        ArgosyError: `data.input-changed`, here or while reading, if the file is shorter than when it was listed.
    """
    raw: io.RawIOBase
    if file.is_remote:
        from argosy.data.remote.remote_inputs import RemoteInput

        raw = RemoteInput(file)
    else:
        check_unchanged([file])
        raw = _LocalInput(file)
    return io.BufferedReader(raw, buffer or (REMOTE_BUFFER if file.is_remote else LINE_BUFFER))


class _LocalInput(io.FileIO):
    """A local file with a known size. Reaching the end before that size is an error."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file.location)
        self._file = file

    def readinto(self, target: Any) -> int:
        count = super().readinto(target) or 0
        if not count and len(target) and self.tell() < self._file.size:
            raise input_changed(self._file, f"it ended at byte {self.tell():,} of {self._file.size:,}")
        return count

    def readall(self) -> bytes:
        content = super().readall() or b""
        if self.tell() < self._file.size:
            raise input_changed(self._file, f"it ended at byte {self.tell():,} of {self._file.size:,}")
        return content


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Refuse inputs whose fingerprint differs from when they were listed."""
    for file in files:
        if not file.is_copy:
            require_same(file, fingerprint_now(file))


def fingerprint_now(file: InputFile) -> InputFile:
    """Return `file` with its current size and version."""
    if file.is_remote:
        from argosy.data.remote.remote_inputs import look_again

        return look_again(file)
    try:
        now = local_input(file.location)
    except OSError as error:
        if may_pass(error):
            raise _interrupted(file, error) from None
        raise input_changed(file, f"it can no longer be read: {error.strerror}") from None
    return replace(file, size=now.size, version=now.version, inode=now.inode)


def require_same(before: InputFile, now: InputFile, *, since: str = "while it was being prepared") -> None:
    """Refuse a file whose fingerprint differs. The error names each difference."""
    differences = []
    if before.size != now.size:
        differences.append(f"size {before.size:,} -> {now.size:,} bytes")
    if before.version and before.version != now.version:
        differences.append(f"{before.version} -> {now.version or 'unknown'}")
    if before.inode and now.inode and before.inode != now.inode:
        differences.append(f"inode {before.inode} -> {now.inode}, so it is another file of that name")
    if differences:
        raise input_changed(before, "; ".join(differences), since=since)


def input_changed(file: InputFile, what: str, *, since: str = "while it was being prepared") -> ArgosyError:
    """Return the `data.input-changed` error."""
    return ArgosyError(
        "data.input-changed",
        f"{file.path} changed {since}: {what}",
        fix="leave the inputs alone until the corpus is made, then start over with --overwrite (or remove the unfinished corpus)",
    )


def _interrupted(file: InputFile, error: Exception) -> ArgosyError:
    reason = getattr(error, "strerror", None) or error
    return ArgosyError(
        "data.interrupted",
        f"{file.path}: {reason}",
        fix="run the same command again; if it fails again, look at the kernel log (dmesg) and the file server",
    )


@contextlib.contextmanager
def reading(files: Sequence[InputFile], where: str = "") -> Iterator[None]:
    """Convert the exceptions of readers on damaged content into a `data.bad-input` error that names the file.

    If the file has changed, the error says that instead, because a change explains the damage. If the file system failed in a way that
    may pass, it is `data.interrupted`.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if may_pass(error):
            raise _interrupted(files[0], error) from error
        check_unchanged(files)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ArgosyError(
            "data.bad-input", f"{files[0].path}{where}: {reason}", fix="check the file, then run it again"
        ) from error


def decompressed(raw: BinaryIO, file: InputFile) -> BinaryIO:
    """Return a forward-only stream of the decompressed bytes. The file's suffix decides the compression."""
    if not file.is_compressed:
        return raw
    if file.path.endswith(".gz"):
        import gzip

        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    return cast(BinaryIO, io.BufferedReader(FrameStream(raw, file.path), buffer_size=1 << 20))


class FrameStream(io.RawIOBase):
    """A decompressed stream of one or more zstandard frames or xz streams. A truncated file raises EOFError."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        self._raw, self._name, self._is_xz = raw, name, name.endswith(".xz")
        self._frame = self._new_frame()
        self._compressed, self._ready, self._in_frame = b"", memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(1 << 20)
                if not self._compressed:
                    if self._in_frame:
                        raise EOFError(f"{self._name} ends in the middle of its compressed data")
                    return 0
            self._decompress()
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        if self._is_xz and not self._in_frame:
            # Zero bytes may fill the space between xz streams. None begins with one.
            self._compressed = self._compressed.lstrip(b"\0")
            if not self._compressed:
                return
        try:
            self._ready = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            raise OSError(f"{self._name} is not {'xz' if self._is_xz else 'zstandard'} data: {error}") from None
        self._in_frame, self._compressed = True, b""
        if self._frame.eof:
            self._compressed, self._frame, self._in_frame = self._frame.unused_data, self._new_frame(), False

    def _new_frame(self) -> Any:
        """Return a decompressor of one frame: `decompress`, `eof` and `unused_data` are alike in both libraries."""
        if self._is_xz:
            import lzma

            self._error: type[Exception] = lzma.LZMAError
            return lzma.LZMADecompressor(lzma.FORMAT_XZ)
        import zstandard

        self._error = zstandard.ZstdError
        return zstandard.ZstdDecompressor().decompressobj()

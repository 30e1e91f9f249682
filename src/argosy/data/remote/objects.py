"""Range reads from object storage (S3, GCS, Azure, HTTP, anything fsspec supports), with retries.

Transient errors are retried with exponential back-off and jitter, so that a thousand readers do not return together: 429 (not
before its Retry-After), 5xx, timeouts, broken connections, and bodies of the wrong length. After `retry_timeout_s` in all, the
error names the object and the last failure. Permanent errors are raised at once: a missing object, missing or rejected
credentials, any other 4xx. Some back ends also retry by themselves; S3's is configured not to, because it ignores
Retry-After.

Each back end raises its own exception classes, some wrapped in others (fsspec's HTTP raises FileNotFoundError for a 500). So an
error is classified by the HTTP status anywhere in its chain of causes, and by its class only if there is none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from argosy.data.text.inputs import require
from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.retry import TRANSIENT_STATUSES, Clock, GaveUp, RetryPolicy, Transient, retry_after_s

# The size of one request when a whole object is read.
_CHUNK = 8 << 20  # bytes
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "ClientAuthenticationError",
    "DefaultCredentialsError",
)
_AZURE = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or _SAS_TOKEN"
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`"
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=true",
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
}
_USUAL = ("s3", "gs", "az", "abfs", "https", "http", "hf", "file")
_VERSION_KEYS = ("ETag", "etag", "generation", "Last-Modified", "LastModified", "last_modified", "mtime", "created")
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"retries": {"max_attempts": 0}}}}

Result = TypeVar("Result")


@dataclass(frozen=True)
class ObjectFacts:
    """The metadata of an object. `version` changes when the content does; `size` is None if the store does not report it."""

    size: int | None
    version: str


class ObjectStore:
    """The objects under one URL. It is thread-safe.

    Args:
        url: The URL of the directory.
        retry_timeout_s: The total time to retry one operation.
        attempt_s: The timeout of one attempt, for back ends that run on an event loop.
    """

    def __init__(self, url: str, *, retry_timeout_s: float = 300.0, attempt_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.retry_timeout_s, self.attempt_s = retry_timeout_s, attempt_s
        self._closed = threading.Event()
        self._retry = RetryPolicy(
            attempts=None,
            base_s=0.2,
            cap_s=30.0,
            jitter=0.5,
            budget_s=retry_timeout_s,
            clock=Clock(sleep=self._closed.wait),
        )
        self._fsspec = require("fsspec", "remote", "reading from object storage")
        self._scheme = url.partition("://")[0]
        if "?" in url:
            raise ArgosyError(
                "data.bad-input",
                f"{url.partition('?')[0]}?… is the address of one object, not of a prepared corpus",
                fix="give the address of the directory; credentials come from the environment",
            )
        self._system, self._root = self._connect()

    def name(self, name: str) -> str:
        """Return the full URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def facts(self, name: str) -> ObjectFacts:
        """Return the current size and version of an object."""

        def look() -> ObjectFacts:
            # Some back ends answer from a cached listing.
            self._system.invalidate_cache()
            info = self._call("info", name)
            if info.get("partial") is False:
                raise ArgosyError(
                    "data.fetch-failed",
                    f"the server of {self.name(name)} does not answer range requests (Accept-Ranges: none)",
                    fix="serve the corpus from object storage, or copy it to a local disk",
                )
            return _facts_of(info)

        return self._with_retries(name, look)

    def listing(self, pattern: str = "") -> dict[str, ObjectFacts]:
        """Return the objects below this URL, or those that match a pattern, by relative name.

        The name is empty if the URL is an object itself.
        """

        def look() -> dict[str, ObjectFacts]:
            self._system.invalidate_cache()
            if pattern:
                entries = self._system.glob(f"{self._root}/{pattern}", detail=True)
            elif self._system.isdir(self._root):
                entries = self._system.find(self._root, detail=True)
            else:
                entries = {self._root: self._system.info(self._root)}
            files = {path: info for path, info in entries.items() if info.get("type", "file") == "file"}
            return {path.removeprefix(self._root).lstrip("/"): _facts_of(info) for path, info in files.items()}

        return self._with_retries(pattern, look)

    def read(
        self, name: str, start: int, count: int, version: str = "", recheck: Callable[[], None] | None = None
    ) -> bytes:
        """Read exactly `count` bytes from `start` on.

        Args:
            name: The object.
            start: The first byte.
            count: The number of bytes.
            version: Require this version of the object, if the back end supports it.
            recheck: A function called after a read of the wrong length. It raises if the object has changed.
        """
        options = self._pinned(version)

        def get() -> bytes:
            body: bytes = self._call("cat_file", name, start=start, end=start + count, **options)
            if len(body) != count:
                if recheck is not None:
                    recheck()
                raise _WrongLength(f"received {len(body):,} bytes instead of {count:,} (from byte {start:,})")
            return body

        return self._with_retries(name, get) if count else b""

    def chunks(self, name: str, size: int) -> Iterator[bytes]:
        """Read a whole object of known size in chunks."""
        for start in range(0, size, _CHUNK):
            yield self.read(name, start, min(_CHUNK, size - start))

    def read_small(self, name: str, limit: int = 64 << 20) -> bytes:
        """Read a whole small object. Refuse one of more than `limit` bytes."""
        size = self.facts(name).size
        if size is None:
            body: bytes = self._with_retries(name, lambda: self._call("cat_file", name))
            return body
        if size > limit:
            raise ArgosyError(
                "data.bad-input",
                f"{self.name(name)} has {size:,} bytes; it should be a small file of at most {limit:,}",
                fix="check that the address is that of a corpus made by `argosy data prepare`",
            )
        return b"".join(self.chunks(name, size))

    def close(self) -> None:
        """Wake the threads that sleep between two attempts, and make them give up."""
        self._closed.set()

    def _connect(self) -> tuple[Any, str]:
        options = _OPTIONS.get(self._scheme, {})
        known = {*self._fsspec.available_protocols(), *self._fsspec.registry}
        if self._scheme not in known:
            raise ArgosyError(
                "data.bad-input",
                f"{self.url}: {self._scheme}:// is not a supported scheme",
                fix=f"supported: {', '.join(scheme for scheme in _USUAL if scheme in known)}",
            )
        try:
            system, root = self._fsspec.core.url_to_fs(self.url, **options, skip_instance_cache=bool(options))
        except ImportError as error:
            raise ArgosyError("data.missing-extra", f"{self.url}: {error}", fix=install_extra("remote")) from None
        except Exception as error:
            # Every back end has its own exception classes. Most failures are missing credentials, some of them a ValueError.
            fault = _classify(error)
            if isinstance(error, (ValueError, OSError)):
                fault = _Fault("credentials", str(error))
            raise self._refusal("", fault) from error
        if self._scheme == "s3":
            system.retries = 1
        return system, str(root).rstrip("/")

    def _call(self, method: str, name: str, **options: Any) -> Any:
        """Make one attempt, with a timeout of `attempt_s` for back ends that run on an event loop."""
        path = f"{self._root}/{name}"
        if not self._system.async_impl:
            return getattr(self._system, method)(path, **options)
        coroutine = getattr(self._system, f"_{method}")
        return self._fsspec.asyn.sync(self._system.loop, coroutine, path, timeout=self.attempt_s, **options)

    def _pinned(self, version: str) -> dict[str, Any]:
        if self._scheme not in ("http", "https"):
            return {}
        # A range of compressed bytes would be useless.
        headers = {"Accept-Encoding": "identity"}
        key, _, value = version.partition("=")
        if key == "ETag" and not value.startswith("W/"):
            headers["If-Match"] = value
        return {"headers": headers}

    def _with_retries(self, name: str, attempt: Callable[[], Result]) -> Result:
        def once() -> Result:
            try:
                return attempt()
            except ArgosyError:
                raise
            except Exception as error:  # noqa: BLE001 - every back end has its own exception classes
                fault = _classify(error)
            if not fault.is_transient:
                raise self._refusal(name, fault)
            raise Transient(fault.what, retry_after_s=fault.retry_after_s)

        try:
            return self._retry.call(once)
        except GaveUp as over:
            raise ArgosyError(
                "data.fetch-failed",
                f"{self.name(name)} could not be read in {over.attempts} attempts over {over.elapsed_s:.0f} s; "
                f"the last error was: {over}",
                fix="check the network and the store, then start again: what is complete in the cache is kept",
            ) from None

    def _refusal(self, name: str, fault: _Fault) -> ArgosyError:
        if fault.kind == "missing":
            return ArgosyError("data.not-found", f"there is no {self.name(name)}", fix="check the address")
        if fault.kind == "changed":
            return ArgosyError(
                "data.corrupt",
                f"{self.name(name)} was replaced while it was being read: {fault.what}",
                fix="start again; prepare a new corpus under a new name rather than over one in use",
            )
        fix = "check the address and the request"
        if fault.kind == "credentials":
            fix = "set credentials that may read it in the environment"
            fix += f": {_CREDENTIALS[self._scheme]}" if self._scheme in _CREDENTIALS else ""
        return ArgosyError("data.fetch-failed", f"{self.name(name)} cannot be read: {fault.what}", fix=fix)


def _facts_of(info: dict[str, Any]) -> ObjectFacts:
    size = info.get("size")
    version = next((f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key)), "")
    return ObjectFacts(None if size is None else int(size), version)


class _WrongLength(Exception):
    """A body shorter or longer than the requested range."""


@dataclass(frozen=True)
class _Fault:
    # transient | missing | credentials | changed | refused
    kind: str
    what: str
    retry_after_s: float | None = None

    @property
    def is_transient(self) -> bool:
        return self.kind == "transient"


def _classify(error: BaseException) -> _Fault:
    chain = list(_chain(error))
    what = f"{type(chain[-1]).__name__}: {chain[-1]}"
    for link in chain:
        if any(kind.__name__ in _NO_CREDENTIALS for kind in type(link).__mro__):
            return _Fault("credentials", what)
    for link in chain:
        status, headers = _status(link)
        if status is not None:
            return _Fault(_kind_of(status), f"HTTP {status} ({what})", retry_after_s(dict(headers or {})))
    if any(isinstance(link, TimeoutError) for link in chain):
        return _Fault("transient", f"no answer in time ({type(error).__name__})")
    if any(isinstance(link, (ConnectionError, _WrongLength)) for link in chain):
        return _Fault("transient", what)
    # gcsfs reports a 403 as "Forbidden: ".
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):
        return _Fault("credentials", what)
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        # fsspec's HTTP raises FileNotFoundError for any failure of `info`, with the true error as its cause.
        return _Fault("missing" if len(chain) == 1 else "transient", what)
    if isinstance(error, (TypeError, ValueError, NotImplementedError, ImportError)):
        return _Fault("refused", what)
    return _Fault("transient", what)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _kind_of(status: int) -> str:
    if status in TRANSIENT_STATUSES or status < 400:
        return "transient"
    return {401: "credentials", 403: "credentials", 404: "missing", 410: "missing", 412: "changed", 416: "changed"}.get(
        status, "refused"
    )


def _status(error: BaseException) -> tuple[int | None, Any]:
    """Return the HTTP status and headers that an exception of aiohttp, botocore, azure or gcsfs carries."""
    # A malformed response. Its status 400 is the one that a server would send.
    if type(error).__module__ == "aiohttp.http_exceptions":
        return None, None
    response = getattr(error, "response", None)
    # botocore
    if isinstance(response, dict):
        answer = response.get("ResponseMetadata", {})
        return _whole(answer.get("HTTPStatusCode")), answer.get("HTTPHeaders", {})
    for attribute in ("status", "status_code", "code"):
        if (status := _whole(getattr(error, attribute, None))) is not None:
            return status, getattr(error, "headers", None) or getattr(response, "headers", None)
    return None, None


def _whole(value: object) -> int | None:
    with contextlib.suppress(TypeError, ValueError):
        number = int(value)  # type: ignore[call-overload]
        return number if 100 <= number <= 599 else None
    return None

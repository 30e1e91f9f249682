"""The HTTP client of `argosy data fetch`: connections, retries, redirects and the Hub token.

Retries: all threads obey `Retry-After`, other transient errors use exponential back-off with jitter, and the number of
attempts is bounded. Security: only http and https, never link-local or cloud metadata addresses (checked after DNS, and again
on the open connection), never a redirect from https to http. The Hub token comes from HF_TOKEN, is sent to the Hub's own
origin only, and appears in no message: a redirect to a CDN is followed without it.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import random
import re
import socket
import ssl
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, getproxies, proxy_bypass

from argosy import __version__
from argosy.errors import ArgosyError

T = TypeVar("T")
Headers = Mapping[str, str]

_REDIRECTS = 8
_REDIRECT_CODES = (301, 302, 303, 307, 308)
# Status codes to retry, besides every 5xx.
_TRANSIENT_CODES = (408, 425, 429)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# The metadata addresses of AWS over IPv6, Alibaba and Oracle. Those of other clouds are link-local.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192")))


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of retrying. All times are in seconds."""

    # Failures in a row without progress.
    attempts: int = 8
    # The first back-off delay; it doubles with each failure.
    first_delay: float = 1.0
    max_delay: float = 60.0
    # A server that asks for a longer Retry-After is an error.
    max_retry_after: float = 3600.0
    # The timeout of a connection, and of each read.
    timeout: float = 60.0


class Transient(Exception):
    """An error that is worth a retry.

    Args:
        reason: The error message.
        retry_after: The delay in seconds that the server asks for.
        progressed: True if bytes were received before the error, which resets the count of failures.
    """

    def __init__(self, reason: str, *, retry_after: float | None = None, progressed: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.progressed = retry_after, progressed


class BadStatus(Exception):
    """A 4xx response for which a retry is useless. The caller knows what it means."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        super().__init__(f"HTTP {response.status} for {shown(url)}")
        self.url, self.status, self.headers = url, response.status, response.headers

    @property
    def hub_code(self) -> str:
        """The Hub's own error code: GatedRepo, RepoNotFound, RevisionNotFound, EntryNotFound."""
        return self.headers.get("X-Error-Code", "")


class Stopped(Exception):
    """An abort, because another thread failed or the user interrupted."""


class Web:
    """The HTTP client, shared by all threads of a fetch."""

    def __init__(self, retry_policy: RetryPolicy | None = None) -> None:
        self.retry_policy = retry_policy or RetryPolicy()
        self.hub = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
        check_url(self.hub, "HF_ENDPOINT")
        self._token = _token_for(self.hub)
        self._stopped = threading.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        # The monotonic time until which a server asked us to wait.
        self._not_before = 0.0
        self._lock = threading.Lock()
        self._opener = _opener(self._connected)

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def open(self, url: str, headers: Headers | None = None, *, other_hosts: bool = False) -> http.client.HTTPResponse:
        """Send one GET request and follow redirects. `other_hosts` allows redirects to other hosts, which the Hub needs.

        Raises:
            Transient: The request may be retried.
            BadStatus: The server answered with another 4xx.
        """
        named = url
        for _ in range(_REDIRECTS):
            response = self._send(url, headers or {})
            if response.status not in _REDIRECT_CODES:
                break
            response.close()
            target = urljoin(url, response.headers.get("Location", ""))
            _check_redirect(url, target, named, other_hosts)
            url = target
        else:
            refuse(f"{shown(named)} redirects more than {_REDIRECTS} times", "check the URL")
        if response.status < 400:
            return response
        response.close()
        if response.status in _TRANSIENT_CODES or response.status >= 500:
            raise Transient(f"HTTP {response.status}", retry_after=_retry_after(response.headers))
        if other_hosts and response.status == 403 and origin(url) != origin(named):
            raise Transient("a signed link has expired (HTTP 403)")
        raise BadStatus(url, response)

    def read(self, response: http.client.HTTPResponse, size: int, *, whole: bool = False) -> bytes:
        """Read the bytes that have arrived, at most `size`. `whole` waits for all of them."""
        if self._stopped.is_set():
            raise Stopped
        try:
            return response.read(size) if whole else response.read1(size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Transient(_reason(error)) from None

    def retry(self, what: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds, or until too many failures in a row made no progress.

        Args:
            what: The name of the operation, for messages.
            attempt: The operation. It raises `Transient` to be retried.
        """
        failures = 0
        while True:
            self._wait_until(self._not_before)
            try:
                return attempt()
            except Transient as trouble:
                failures = 1 if trouble.progressed else failures + 1
                if self._stopped.is_set():
                    raise Stopped from None
                if failures >= self.retry_policy.attempts:
                    raise ArgosyError(
                        "data.fetch-failed",
                        f"{what}: {trouble}, {failures} times in a row",
                        fix="run it again later: what was fetched is kept",
                    ) from None
                self._back_off(what, trouble, failures)

    def stop(self) -> None:
        """Abort the requests of all threads, even those that wait for a server."""
        self._stopped.set()
        with self._lock:
            connections = list(self._sockets)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The connection is already closed.
                continue

    def _connected(self, connection: socket.socket) -> None:
        """Register a new connection, so that `stop` can close it. Raise Stopped if `stop` has been called."""
        with self._lock:
            self._sockets.add(connection)
        if self._stopped.is_set():
            raise Stopped

    def _send(self, url: str, headers: Headers) -> http.client.HTTPResponse:
        if self._stopped.is_set():
            raise Stopped
        request = Request(
            url, headers={"User-Agent": f"argosy/{__version__}", "Accept-Encoding": "identity", **headers}
        )
        if self._token is not None and origin(url) == origin(self.hub):
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            _check_host(urlsplit(url))
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self.retry_policy.timeout)
            return response
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
            _refuse_hopeless(cause, url)
            raise Transient(_reason(cause)) from None

    def _back_off(self, what: str, trouble: Transient, failures: int) -> None:
        doubled: float = self.retry_policy.first_delay * 2 ** (failures - 1)
        delay = min(self.retry_policy.max_delay, doubled) * random.uniform(0.5, 1.0)
        if trouble.retry_after is None:
            # A single failure is not worth a message.
            if failures > 1:
                again = f"trying again in {delay:.0f} s, {failures} of {self.retry_policy.attempts} attempts failed"
                print(f"note: {what}: {trouble}; {again}", file=sys.stderr, flush=True)
            self._wait_until(time.monotonic() + delay)
            return
        if trouble.retry_after > self.retry_policy.max_retry_after:
            raise ArgosyError(
                "data.fetch-failed",
                f"{what}: {trouble}; the server asks to wait {trouble.retry_after:,.0f} s",
                fix="run it again then: what was fetched is kept",
            )
        until = time.monotonic() + trouble.retry_after
        with self._lock:
            if until > self._not_before + 1.0:
                text = f"note: {trouble}: the server asks to wait {trouble.retry_after:.0f} s"
                print(text, file=sys.stderr, flush=True)
            self._not_before = max(self._not_before, until)
        # Jitter, so that the threads do not all retry at the same instant.
        self._wait_until(until + random.uniform(0.0, min(1.0, delay)))

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            if self._stopped.wait(left):
                raise Stopped


def refuse(cause: str, fix: str) -> NoReturn:
    """Raise `data.fetch-refused`."""
    raise ArgosyError("data.fetch-refused", cause, fix=fix)


def shown(url: str) -> str:
    """Return a URL without user, query and fragment, which may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def origin(url: str) -> tuple[str, str | None, int]:
    """Return (scheme, host, port) of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def check_url(url: str, name: str) -> None:
    """Refuse a URL that is malformed, is not http or https, or contains a user or password. `name` is for the error."""
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        refuse(f"{name}: the URL holds spaces, control or non-ASCII characters", "write them as %20 and the like")
    try:
        parts = urlsplit(url)
        well_formed = bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or parts.scheme not in ("http", "https"):
        refuse(f"{name}: {url.partition('?')[0].rpartition('@')[2]} is not an http or https URL", "check it")
    if "@" in parts.netloc:
        refuse(f"{name}: the URL holds a user or a password", "take them out; secrets come from the environment only")


def is_forbidden(address: str) -> bool:
    """Return True for link-local and cloud metadata addresses, also in their IPv6-mapped, 6to4 and NAT64 forms."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_forbidden(str(inner))
    return ip.is_link_local or ip in _METADATA


def _check_redirect(url: str, target: str, named: str, other_hosts: bool) -> None:
    check_url(target, f"redirect from {shown(url)}")
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
        refuse(f"{shown(url)} redirects from https to {shown(target)}", "name a URL that stays on https")
    if not other_hosts and urlsplit(target).hostname != urlsplit(named).hostname:
        refuse(f"{shown(named)} redirects to another host, {shown(target)}", "name that URL if you trust it")


def _check_host(parts: Any) -> None:
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError:
        # Behind a proxy there may be no DNS.
        if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
            return
        raise
    for *_, address in found:
        _refuse_forbidden(parts.hostname, str(address[0]))


def _refuse_forbidden(host: str, address: str) -> None:
    if is_forbidden(address):
        refuse(f"{host} has the link-local or metadata address {address}", "name a host on the network")


def _refuse_hopeless(error: Exception, url: str) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        raise ArgosyError(
            "data.fetch-failed",
            f"{shown(url)}: the certificate cannot be trusted: {error.verify_message}",
            fix="check the clock; for a private authority set SSL_CERT_FILE",
        ) from None
    if isinstance(error, socket.gaierror) and error.errno in (socket.EAI_NONAME, socket.EAI_FAIL):
        raise ArgosyError(
            "data.fetch-failed",
            f"there is no host {urlsplit(url).hostname}: {error.strerror}",
            fix="check the name, the network, and HTTPS_PROXY where there is one",
        ) from None


def _opener(connected: Callable[[socket.socket], None]) -> OpenerDirector:
    """Build a urllib opener for http and https only. It follows no redirects, raises for no status, and checks each peer address."""

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            _refuse_forbidden(self.host, str(self.sock.getpeername()[0]))
            connected(self.sock)

    class Tls(http.client.HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            _refuse_forbidden(self.host, str(self.sock.getpeername()[0]))
            connected(self.sock)

    class PlainHandler(HTTPHandler):
        def http_open(self, request: Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, request)

    class TlsHandler(HTTPSHandler):
        def https_open(self, request: Request) -> http.client.HTTPResponse:
            return self.do_open(Tls, request, context=context)

    context = ssl.create_default_context()
    opener = OpenerDirector()
    for handler in (ProxyHandler(), PlainHandler(), TlsHandler()):
        opener.add_handler(handler)
    return opener


def _token_for(hub: str) -> str | None:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        return None
    if not re.fullmatch(r"[!-~]+", token):
        refuse("HF_TOKEN holds characters that no token has", "set it again")
    parts = urlsplit(hub)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        refuse(f"HF_TOKEN would go to {shown(hub)} in the clear", "use an https HF_ENDPOINT, or unset HF_TOKEN")
    return token


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    """Return the seconds from `Retry-After` (a number or a date), or from the Hub's `RateLimit: "api";r=0;t=55`."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    # Compare with the server's own clock if the response has a Date.
    if until := _date(text):
        return max(0.0, (until - (_date(headers.get("Date", "")) or datetime.now(UTC))).total_seconds())
    reset = re.search(r";\s*t\s*=\s*([0-9]{1,9})", headers.get("RateLimit", ""))
    return float(reset[1]) if reset else None


def _date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

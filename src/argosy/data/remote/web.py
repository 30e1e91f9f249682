"""The HTTP client of `argosy data fetch`: connections, retries, redirects and the Hub token.

Retries (`argosy.retry`): all threads obey `Retry-After`, other transient errors use exponential back-off with jitter, and the
number of attempts is bounded. Security: only http and https, never link-local or cloud metadata addresses (checked after DNS, and
again on the open connection), never a redirect from https to http. The Hub token comes from HF_TOKEN, is sent to the Hub's own
origin only, and appears in no message: a redirect to a CDN is followed without it.

This is the standard library's HTTP and not httpx, for safety's sake. The address of the socket that was really connected has to be
checked, and `stop` has to reach every open socket; httpx hides both behind a transport and a network backend of httpcore, which
would have to be replaced by more code than `_opener` is. Fetching also works in the core install, which has no HTTP library.
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import os
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, getproxies, proxy_bypass

from argosy import __version__
from argosy.errors import ArgosyError
from argosy.retry import Clock, GaveUp, RetryPolicy, Transient, retry_after_s

_log = logging.getLogger(__name__)
T = TypeVar("T")
Headers = Mapping[str, str]

_REDIRECTS = 8
_REDIRECT_CODES = (301, 302, 303, 307, 308)
# Attempts are counted in a row without a byte gained. A server that asks for more than an hour is not waited for.
RETRY = RetryPolicy(attempts=8, base_s=1.0, cap_s=60.0, jitter=0.5, longest_retry_after_s=3600.0)
# Of a connection, and between two reads.
TIMEOUT_S = 60.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# The metadata addresses of AWS over IPv6, Alibaba and Oracle. Those of other clouds are link-local.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192")))


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

    def __init__(self, retry: RetryPolicy = RETRY, timeout_s: float = TIMEOUT_S) -> None:
        self._retry, self._timeout_s = replace(retry, clock=Clock(sleep=self._pause)), timeout_s
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
        if response.status in self._retry.statuses:
            raise Transient(f"HTTP {response.status}", retry_after_s=retry_after_s(dict(response.headers)))
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

        Raises:
            ArgosyError: the attempts are used up, or the server asks for too long a pause.
            Stopped: `stop` was called.
        """

        def once() -> T:
            self._wait_until(self._not_before)
            return attempt()

        try:
            return self._retry.call(once, lambda *retry: self._announce(what, *retry))
        except GaveUp as over:
            if self._stopped.is_set():
                raise Stopped from None
            asked, longest = over.last.retry_after_s or 0.0, self._retry.longest_retry_after_s
            too_long = longest is not None and asked > longest
            raise ArgosyError(
                "data.fetch-failed",
                f"{what}: {over}; the server asks to wait {asked:,.0f} s"
                if too_long
                else f"{what}: {over}, {self._retry.attempts} times in a row",
                fix=f"run it again {'then' if too_long else 'later'}: what was fetched is kept",
            ) from None

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
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
            return response
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
            _refuse_hopeless(cause, url)
            raise Transient(_reason(cause)) from None

    def _announce(self, what: str, trouble: Transient, failures: int, pause_s: float) -> None:
        """Say why it takes longer, and have all threads keep the quiet that a server asks for."""
        if self._stopped.is_set():
            raise Stopped
        asked = trouble.retry_after_s
        if asked is None:
            # One failure alone is over before anybody wonders.
            if failures > 1:
                again = f"trying again in {pause_s:.0f} s, {failures} of {self._retry.attempts} attempts failed"
                _log.info("%s: %s; %s", what, trouble, again)
            return
        until = time.monotonic() + asked
        with self._lock:
            if until > self._not_before + 1.0:
                _log.info("%s: the server asks to wait %.0f s", trouble, asked)
            self._not_before = max(self._not_before, until)

    def _pause(self, seconds: float) -> None:
        self._wait_until(time.monotonic() + seconds)

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


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

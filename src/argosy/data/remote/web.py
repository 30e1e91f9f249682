"""Careful HTTP for `argosy data fetch`: the one place that opens connections, waits, redirects and sends the token.

Polite: `Retry-After` is kept to by all threads at once, other troubles are met with exponential back-off and jitter, and
tries are bounded. Safe: http and https only, never to link-local or cloud metadata addresses (checked after DNS, and
again on the connection made), never from https down to http. The Hub's token comes from HF_TOKEN, goes to the Hub's own
origin and nowhere else, and is in no message: a redirect to a content network is followed without it.
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
_TRANSIENT_CODES = (408, 425, 429)  # and every 5xx
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = frozenset(  # of AWS over IPv6, Alibaba and Oracle; the others are link-local
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192"))
)


@dataclass(frozen=True)
class Patience:
    attempts: int = 8  # in a row without a byte gained
    first_delay: float = 1.0  # seconds; doubled each time
    longest_delay: float = 60.0
    longest_asked: float = 3600.0  # a server that asks for more is not waited for
    timeout: float = 60.0  # of a connection, and between two reads


class Transient(Exception):
    """Worth another try."""

    def __init__(self, reason: str, *, asked: float | None = None, gained: bool = False) -> None:
        super().__init__(reason)
        self.asked, self.gained = asked, gained


class BadStatus(Exception):
    """A 4xx answer that waiting does not cure; whoever asked knows what it means."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        super().__init__(f"HTTP {response.status} for {shown(url)}")
        self.url, self.status, self.headers = url, response.status, response.headers

    @property
    def hub_code(self) -> str:
        """The Hub's own name for the trouble: GatedRepo, RepoNotFound, RevisionNotFound, EntryNotFound."""
        return self.headers.get("X-Error-Code", "")


class Stopped(Exception):
    """Another thread failed, or the user interrupted."""


class Web:
    """Shared by all threads of a fetch."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.hub = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
        check_url(self.hub, "HF_ENDPOINT")
        self._token = _token_for(self.hub)
        self._stopped = threading.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._not_before = 0.0  # monotonic; a server asked for quiet until then
        self._lock = threading.Lock()
        self._opener = _opener(self._connected)

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def open(self, url: str, headers: Headers | None = None, *, elsewhere: bool = False) -> http.client.HTTPResponse:
        """One try. `elsewhere`: redirects may lead to other hosts, as the Hub's do."""
        named = url
        for _ in range(_REDIRECTS):
            response = self._send(url, headers or {})
            if response.status not in _REDIRECT_CODES:
                break
            response.close()
            target = urljoin(url, response.headers.get("Location", ""))
            _check_redirect(url, target, named, elsewhere)
            url = target
        else:
            refuse(f"{shown(named)} redirects more than {_REDIRECTS} times", "check the URL")
        if response.status < 400:
            return response
        response.close()
        if response.status in _TRANSIENT_CODES or response.status >= 500:
            raise Transient(f"HTTP {response.status}", asked=_asked_delay(response.headers))
        if elsewhere and response.status == 403 and origin(url) != origin(named):
            raise Transient("a signed link has expired (HTTP 403)")
        raise BadStatus(url, response)

    def read(self, response: http.client.HTTPResponse, size: int, *, whole: bool = False) -> bytes:
        """What has come, up to a size; `whole`: wait for all of it."""
        if self._stopped.is_set():
            raise Stopped
        try:
            return response.read(size) if whole else response.read1(size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Transient(_reason(error)) from None

    def patiently(self, what: str, attempt: Callable[[], T]) -> T:
        """Try until it works, or there were too many failures in a row without progress."""
        failures = 0
        while True:
            self._wait_until(self._not_before)
            try:
                return attempt()
            except Transient as trouble:
                failures = 1 if trouble.gained else failures + 1
                if self._stopped.is_set():
                    raise Stopped from None
                if failures >= self.patience.attempts:
                    raise ArgosyError(
                        "data.fetch-failed",
                        f"{what}: {trouble}, {failures} times in a row",
                        fix="run it again later: what was fetched is kept",
                    ) from None
                self._back_off(what, trouble, failures)

    def stop(self) -> None:
        """End what other threads are doing, even where they wait for a server."""
        self._stopped.set()
        with self._lock:
            connections = list(self._sockets)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended by itself

    def _connected(self, connection: socket.socket) -> None:
        """Known to `stop` from now on; one made while that was at work is of no use any more."""
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
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self.patience.timeout)
            return response
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
            _refuse_hopeless(cause, url)
            raise Transient(_reason(cause)) from None

    def _back_off(self, what: str, trouble: Transient, failures: int) -> None:
        doubled: float = self.patience.first_delay * 2 ** (failures - 1)
        delay = min(self.patience.longest_delay, doubled) * random.uniform(0.5, 1.0)
        if trouble.asked is None:
            if failures > 1:  # one alone is over before anybody wonders
                again = f"trying again in {delay:.0f} s, {failures} of {self.patience.attempts} attempts failed"
                print(f"note: {what}: {trouble}; {again}", file=sys.stderr, flush=True)
            self._wait_until(time.monotonic() + delay)
            return
        if trouble.asked > self.patience.longest_asked:
            raise ArgosyError(
                "data.fetch-failed",
                f"{what}: {trouble}; the server asks to wait {trouble.asked:,.0f} s",
                fix="run it again then: what was fetched is kept",
            )
        until = time.monotonic() + trouble.asked
        with self._lock:
            if until > self._not_before + 1.0:
                print(f"note: {trouble}: the server asks to wait {trouble.asked:.0f} s", file=sys.stderr, flush=True)
            self._not_before = max(self._not_before, until)
        self._wait_until(until + random.uniform(0.0, min(1.0, delay)))  # not all threads at the same instant

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            if self._stopped.wait(left):
                raise Stopped


def refuse(cause: str, fix: str) -> NoReturn:
    raise ArgosyError("data.fetch-refused", cause, fix=fix)


def shown(url: str) -> str:
    """Without user, query and fragment, which may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def check_url(url: str, name: str) -> None:
    """Of a known scheme, well formed, and without a password."""
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
    """Link-local addresses, where clouds keep their metadata and credentials, in all their spellings."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_forbidden(str(inner))
    return ip.is_link_local or ip in _METADATA


def _check_redirect(url: str, target: str, named: str, elsewhere: bool) -> None:
    check_url(target, f"redirect from {shown(url)}")
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
        refuse(f"{shown(url)} redirects from https to {shown(target)}", "name a URL that stays on https")
    if not elsewhere and urlsplit(target).hostname != urlsplit(named).hostname:
        refuse(f"{shown(named)} redirects to another host, {shown(target)}", "name that URL if you trust it")


def _check_host(parts: Any) -> None:
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError:
        if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
            return  # behind a proxy there may be no DNS
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
    """No file, ftp or data URLs, no redirects, no exceptions for a status: only http and https through checked sockets."""

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


def _asked_delay(headers: http.client.HTTPMessage) -> float | None:
    """Seconds from `Retry-After` (a number or a date), or from the Hub's `RateLimit: "api";r=0;t=55`."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    if until := _date(text):  # by the server's own clock where it tells it
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

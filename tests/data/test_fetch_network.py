"""`argosy data fetch`: whatever the network does, the files are the data set's own bytes, or the fetch is refused.

The token goes to the Hub alone, and no request goes to a host that was not named.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import loopback_hub as bad
import pytest
from fetching import C4, HASTE, TOKEN, go, loopback_hub, noise, one_file, refused, stored, wanted  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_hub import Hub

from argosy.data.remote import web as web_module
from argosy.data.remote.fetch import JOURNAL
from argosy.data.remote.web import Stopped, Web, is_forbidden
from waiting import wait_for


@pytest.mark.parametrize(
    "faults",
    [
        [bad.status(500), bad.status(503), bad.status(502)],
        [bad.status(429), bad.status(429, RateLimit='"api";r=0;t=0')],
        [bad.truncated(5000), bad.truncated(0), bad.truncated(12_345)],
        [bad.reset, bad.reset],
        [bad.truncated(7000), bad.ignores_ranges],
        [bad.truncated(7000), bad.status(416)],
        [bad.damaged],
        [bad.truncated(7000), bad.damaged],
        [bad.error_page, bad.error_page],
        [bad.stalled(3000, 60.0)],
        # A signed link that has expired.
        [bad.status(403)],
        # More failures than attempts, but each one makes progress.
        [bad.truncated(100)] * 30,
    ],
)
def test_troubles_of_the_network_do_not_show_in_the_bytes(hub: Hub, tmp_path: Path, faults: list[bad.Fault]) -> None:
    name, content = one_file(hub)
    hub.faults["big.jsonl.zst"] = list(faults)
    hub.faults["one/file/tree/" + bad.COMMIT] = [bad.status(500), bad.truncated(1), bad.status(429)]
    go(tmp_path, name, timeout_s=3.0)
    assert stored(tmp_path) == {"big.jsonl.zst": content}
    assert not hub.faults["big.jsonl.zst"]
    assert not list(tmp_path.rglob("*.partial"))


FAULTS = st.sampled_from(
    [
        bad.status(500),
        bad.status(429, Retry_After="0"),
        bad.reset,
        bad.ignores_ranges,
        bad.error_page,
        bad.truncated(900),
    ]
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    size=st.integers(0, 5000), faults=st.lists(FAULTS, max_size=5), left=st.binary(max_size=40), seed=st.integers(0, 9)
)
def test_any_mixture_of_troubles_and_leftovers_ends_in_the_same_bytes(
    hub: Hub, tmp_path_factory: pytest.TempPathFactory, size: int, faults: list[bad.Fault], left: bytes, seed: int
) -> None:
    output = tmp_path_factory.mktemp("fetch")
    content = noise(size, seed)
    hub.files["one/file"] = {"big.jsonl.zst": content}
    (output / "big.jsonl.zst.partial").write_bytes(left if seed % 2 else content[: len(left)])
    hub.faults["//big.jsonl.zst"] = list(faults)
    go(output, "one/file")
    hub.faults.clear()
    assert stored(output) == {"big.jsonl.zst": content}


@pytest.mark.parametrize("fault", [bad.status(429, Retry_After="2"), bad.wait_until_date(3.0)])
def test_a_server_that_asks_to_wait_is_left_alone_by_all_threads(hub: Hub, tmp_path: Path, fault: bad.Fault) -> None:
    asked = []

    def ask_to_wait(handler: bad.Handler, content: bytes, first: int) -> None:
        # Wait until the other thread is busy.
        wait_for(lambda: [r for r in hub.asked("/content/") if "00001-of" in r.path])
        asked.append(time.monotonic())
        fault(handler, content, first)

    def slowly(handler: bad.Handler, content: bytes, first: int) -> None:
        # The thread is ready for its next file before the wait is over.
        handler.send_content(content, first, pace=0.2)

    hub.faults["en/c4-train.00000-of-01024.json.gz"] = [ask_to_wait]
    hub.faults["en/c4-train.00001-of-01024.json.gz"] = [slowly]
    go(tmp_path, "c4", workers=2)
    assert not [request for request in hub.requests if asked[0] < request.time < asked[0] + 1.95]
    assert stored(tmp_path) == wanted(hub, C4, "en/c4-train")


def test_a_wait_that_is_too_long_and_endless_errors_are_refused(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="argosy")
    name, _ = one_file(hub)
    hub.faults["big.jsonl.zst"] = [bad.status(429, Retry_After="86400")]
    assert "asks to wait 86,400 s" in refused(tmp_path, name).cause
    hub.faults["big.jsonl.zst"] = [bad.status(500)] * 50
    error = refused(tmp_path, name)
    assert error.code == "data.fetch-failed"
    assert "HTTP 500, 6 times in a row" in error.cause
    # Waiting is reported.
    assert "HTTP 500; trying again in 0 s, 5 of 6 attempts failed" in caplog.text
    assert len(hub.faults["big.jsonl.zst"]) == 44


def test_content_with_another_hash_never_gets_the_name(hub: Hub, tmp_path: Path) -> None:
    name, _ = one_file(hub)
    hub.faults["big.jsonl.zst"] = [bad.damaged] * 3
    error = refused(tmp_path, name)
    assert error.code == "data.fetch-failed"
    assert "sha256" in error.cause
    assert stored(tmp_path) == {}


def test_a_small_file_is_checked_by_its_git_hash(hub: Hub, tmp_path: Path) -> None:
    hub.faults["resolve/" + bad.COMMIT + "/en/notes.txt"] = [bad.damaged] * 2
    assert "git hash" in refused(tmp_path, "hf://datasets/allenai/c4/en/notes.txt").cause
    go(tmp_path, "hf://datasets/allenai/c4/en/notes.txt")
    assert stored(tmp_path) == {"en/notes.txt": b"kept in git"}


def test_a_partial_file_is_continued(hub: Hub, tmp_path: Path) -> None:
    name, content = one_file(hub)
    (tmp_path / "big.jsonl.zst.partial").write_bytes(content[:15_000])
    go(tmp_path, name)
    assert stored(tmp_path) == {"big.jsonl.zst": content}
    assert [request.headers["range"] for request in hub.asked("/content/")] == ["bytes=15000-"]


def test_the_token_goes_to_the_hub_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content = one_file(hub)
    hub.gated.add(name)
    hub.token = TOKEN
    error = refused(tmp_path, name)
    assert "accept the terms" in error.fix
    assert "HF_TOKEN" in error.fix
    monkeypatch.setenv("HF_TOKEN", "hf_without_access")
    assert "has no access" in refused(tmp_path, name).cause
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.requests.clear()
    hub.faults["big.jsonl.zst"] = [bad.status(500), bad.truncated(10)]
    go(tmp_path, name)
    assert stored(tmp_path) == {"big.jsonl.zst": content}
    sent = {(request.host, "authorization" in request.headers) for request in hub.requests}
    assert sent == {(f"127.0.0.1:{hub.port}", True), (f"localhost:{hub.content_port}", False)}
    hub.next_page = f"{hub.content_url}/api/datasets/steal"
    assert "continues on another host" in str(refused(tmp_path, "c4"))
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    leak = str(refused(tmp_path, name))
    assert "in the clear" in leak
    written = leak + "".join(capfd.readouterr()) + (tmp_path / JOURNAL).read_text()
    assert TOKEN not in written


@pytest.mark.parametrize(
    "name", ["../up.jsonl", "/etc/x.jsonl", "a/../../x.jsonl", "a\\b.jsonl", "a/\x1b[2J.jsonl", "a/.ssh/x.jsonl"]
)
def test_listed_names_cannot_leave_the_directory(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.files["evil/set"]["train/ok.jsonl"] = b"{}"

    def answer(handler: bad.Handler, content: bytes, first: int) -> None:
        handler.answer(200, json.dumps(bad.listing({name: b"{}"}, "", True)).encode())

    hub.faults["/tree/" + bad.COMMIT + "/train"] = [answer]
    error = refused(tmp_path / "out", "evil/set")
    assert "unsafe name" in error.cause
    assert [path.name for path in tmp_path.rglob("*")] == ["out", JOURNAL]


@pytest.mark.parametrize(
    ("address", "forbidden"),
    [("169.254.169.254", True), ("::ffff:169.254.169.254", True), ("fd00:ec2::254", True), ("fe80::1%eth0", True),
     ("64:ff9b::a9fe:a9fe", True), ("2002:a9fe:a9fe::1", True), ("100.100.100.200", True), ("10.0.0.1", False),
     ("127.0.0.1", False), ("8.8.8.8", False), ("2001:db8::1", False)],
)  # fmt: skip
def test_metadata_addresses_are_known_in_all_spellings(address: str, forbidden: bool) -> None:
    assert is_forbidden(address) is forbidden


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "2852039166", "[fd00:ec2::254]", "0xa9fea9fe", "[::ffff:a9fe:a9fe]"]
)
def test_metadata_addresses_are_refused_after_dns_and_after_a_redirect(hub: Hub, tmp_path: Path, host: str) -> None:
    assert "metadata address" in refused(tmp_path, f"http://{host}/latest/x.jsonl").cause
    name, _ = one_file(hub)
    hub.redirect_to = f"http://{host}/latest/x"
    assert "metadata address" in refused(tmp_path, name).cause


def test_a_plain_url_is_continued_only_while_it_is_the_same_file(hub: Hub, tmp_path: Path) -> None:
    old, new = noise(9000, 1), noise(9000, 2)
    hub.plain["x.jsonl"] = old
    url = f"{hub.url}/plain/x.jsonl?sig=secret"
    tag_only = [lambda handler, content, first: handler.send_content(content, 0, last=0, tag='"a"')]
    hub.faults["/plain/x.jsonl"] = [*tag_only, bad.truncated(4000), *[bad.status(500)] * 6]
    assert refused(tmp_path, url).code == "data.fetch-failed"
    assert (tmp_path / "x.jsonl.partial").read_bytes() == old[:4000]
    hub.plain["x.jsonl"] = new
    go(tmp_path, url)
    assert stored(tmp_path) == {"x.jsonl": new}
    hub.requests.clear()
    assert go(tmp_path, url).new_bytes == 0
    # One request, for size and tag.
    assert len(hub.requests) == 1
    hub.plain["y.jsonl"] = old
    # A partial file that is not ours.
    (tmp_path / "y.jsonl.partial").write_bytes(new[:100])
    hub.plain["empty.txt"] = b""
    digest = hashlib.sha256(old).hexdigest()
    with (tmp_path / JOURNAL).open("ab") as journal:
        # A kill may leave a truncated line.
        journal.write(b'{"path": "y.js')
    both = f"{hub.url}/plain/empty.txt", f"{hub.url}/plain/y.jsonl#sha256={digest}"
    go(tmp_path, *both, workers=1)
    assert go(tmp_path, *both).new_bytes == 0
    assert stored(tmp_path) == {"x.jsonl": new, "y.jsonl": old, "empty.txt": b""}
    assert "secret" not in (tmp_path / JOURNAL).read_text()


def test_a_plain_url_that_is_cut_short_is_continued_with_its_tag(hub: Hub, tmp_path: Path) -> None:
    hub.plain["x.jsonl"] = noise(9000, 1)
    whole = [lambda handler, content, first: handler.send_content(
        content, 0, last=0, tag=f'"{hashlib.sha256(content).hexdigest()[:16]}"')]  # fmt: skip
    hub.faults["/plain/x.jsonl"] = [*whole, bad.truncated(4000)]
    go(tmp_path, f"{hub.url}/plain/x.jsonl")
    assert stored(tmp_path) == {"x.jsonl": hub.plain["x.jsonl"]}
    assert hub.requests[-1].headers["range"] == "bytes=4000-"
    assert "if-range" in hub.requests[-1].headers


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("{hub}/plain/away.jsonl", "another host"),
        ("http://user:hunter2@127.0.0.1/x.jsonl", "password"),
        ("{hub}/plain/none.jsonl", "HTTP 404"),
        ("{hub}/plain/x.jsonl#md5=1", "not understood"),
        ("{hub}/plain/x y.jsonl", "spaces"),
        ("file:///etc/passwd", "cannot be fetched"),
        ("http://127.0.0.1:99999/x", "not an http"),
    ],
)
def test_urls_that_lead_elsewhere_or_hold_secrets_are_refused(hub: Hub, tmp_path: Path, url: str, cause: str) -> None:
    hub.plain["x.jsonl"] = hub.plain["away.jsonl"] = b"{}"
    away = bad.status(302, Location=f"{hub.content_url}/plain/x.jsonl?sig=canary")
    hub.faults["/plain/away.jsonl"] = [away]
    error = str(refused(tmp_path, url.replace("{hub}", hub.url)))
    assert cause in error
    assert "hunter2" not in error
    assert "canary" not in error


def test_a_failure_ends_the_other_downloads_at_once_and_keeps_the_rest(hub: Hub, tmp_path: Path) -> None:
    hub.faults["00001-of-01024.json.gz"] = [bad.stalled(3000, 600.0)]
    hub.faults["00002-of-01024.json.gz"] = [bad.status(404)]
    refused(tmp_path, "c4", workers=3, retry=replace(HASTE, attempts=3, base_s=0.3), timeout_s=600)
    hub.faults.clear()
    go(tmp_path, "c4")
    assert stored(tmp_path) == wanted(hub, C4, "en/c4-train")


def test_a_connection_made_while_all_are_being_stopped_is_not_waited_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.plain["slow.jsonl"] = b"{}"
    hub.faults["slow.jsonl"] = [lambda handler, body, start: time.sleep(600)]
    web = Web()
    # Stop after the check of the stop flag and before connecting.
    monkeypatch.setattr(web_module, "_check_host", lambda parts: web.stop())
    with pytest.raises(Stopped):
        web.open(f"{hub.url}/plain/slow.jsonl")

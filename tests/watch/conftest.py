"""A dashboard on loopback, and a real browser for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENCE_S, wait_for

TOKEN = "a token of the test"
# Of the browser's start, and of whatever is waited for on a page.
TIMEOUT_MS = 1000 * PATIENCE_S
VIEWPORT = {"width": 1280, "height": 900}


class Dashboard:
    """The server of `argosy dash` in a thread, on a port of its own."""

    def __init__(self, root: Path) -> None:
        import uvicorn

        from argosy.watch.dashboard import _listen
        from argosy.watch.server import make_app

        listener = _listen(0)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(make_app(root, TOKEN), log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)


def shown_whole(page: Any) -> None:
    """Wait until the dashboard's page has drawn all that it asks for: each card and chart comes with an answer of its own, and those
    above move those below."""
    page.locator("#pulse", has_text="live").wait_for()


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    root = tmp_path / "runs"
    root.mkdir(exist_ok=True)
    server = Dashboard(root)
    yield server
    server.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium; .ci/run installs Debian's")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is part of argosy[dev]")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=TIMEOUT_MS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def opened(browser: Any) -> Iterator[Any]:
    """The one page of all tests: a new context for each would take as long as many of the tests."""
    context = browser.new_context(viewport=VIEWPORT, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    yield page
    context.close()


@pytest.fixture
def page(opened: Any, dashboard: Dashboard) -> Any:
    """The page, logged in to the test's own dashboard. Errors in it are collected in `page.problems`."""
    opened.goto(f"{dashboard.address}/?token={TOKEN}")
    opened.problems.clear()
    return opened

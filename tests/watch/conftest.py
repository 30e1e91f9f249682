"""A dashboard on loopback, and a real browser for it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOKEN = "a token of the test"


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
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


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
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, dashboard: Dashboard) -> Iterator[Any]:
    """A page that is logged in. Errors in it are collected in `page.problems`."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    opened.problems = []
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("console", lambda message: opened.problems.append(message.text) if message.type == "error" else None)
    opened.goto(f"{dashboard.address}/?token={TOKEN}")
    yield opened
    context.close()

"""`argosy ckpt push`: an exported model reaches a Hub through its own client, and nothing else does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint.hf import hf_push
from argosy.checkpoint.hf.hf_push import push_model
from argosy.errors import ArgosyError


class Hub(BaseHTTPRequestHandler):
    """The calls of an upload: the repository is made, files are announced, and a commit carries them."""

    received: dict[str, Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            self.server.received["repo"] = json.loads(body)  # type: ignore[attr-defined]
            return self._answer({"url": f"http://{self.headers['Host']}/me/mine"})
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        for line in body.splitlines():
            one = json.loads(line)
            if one["key"] == "file":
                self.server.received[one["value"]["path"]] = base64.b64decode(one["value"]["content"])  # type: ignore[attr-defined]
        return self._answer({"commitUrl": f"http://{self.headers['Host']}/me/mine/commit/0", "commitOid": "0" * 40})

    def do_GET(self) -> None:
        self._answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def _answer(self, document: object, status: int = 200) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return what the Hub has received."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.received = {}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    yield server.received  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.pkl"):
        (tmp_path / name).write_bytes(b"{}")
    return tmp_path


def test_the_files_of_a_model_are_pushed_and_no_others(hub: dict[str, Any], exported: Path) -> None:
    found = push_model(exported, "me/mine", private=True)
    assert found.url is not None
    assert found.url.endswith("/me/mine")
    assert hub.pop("repo")["name"] == "mine"
    assert hub == dict.fromkeys(("config.json", "model.safetensors", "tokenizer.json"), b"{}")


def test_a_dry_run_sends_nothing(hub: dict[str, Any], exported: Path) -> None:
    assert push_model(exported, "me/mine", private=True, dry_run=True).url is None
    assert not hub


def test_a_hub_that_refuses_is_a_refusal(hub: dict[str, Any], exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(ArgosyError) as refused:
        push_model(exported, "me/mine", private=True)
    assert refused.value.code == "hf.push-failed"
    assert "HF_TOKEN" in refused.value.fix


def test_what_is_no_export_and_what_is_no_repository_are_refused(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgosyError, match="no name of a repository"):
        push_model(exported, "mine", private=True)
    with pytest.raises(ArgosyError, match="holds no exported model"):
        push_model(tmp_path / "none", "me/mine", private=True)
    (exported / "secret.json").symlink_to("/etc/hostname")
    with pytest.raises((ArgosyError, OSError)):
        push_model(exported, "me/mine", private=True, dry_run=True)
    (exported / "secret.json").unlink()
    monkeypatch.setattr(hf_push.importlib, "import_module", _missing)
    with pytest.raises(ArgosyError, match="needs the Python package huggingface_hub"):
        push_model(exported, "me/mine", private=True)


def _missing(name: str) -> None:
    raise ImportError(name)

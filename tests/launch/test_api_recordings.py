"""The emulated API server answers as real ones do: the recorded conversation is held with it, and every answer is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_conversation import SPACE, Answer, Conversation, asking, settled
from api_server import ApiServer

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    server = ApiServer()
    server.namespaces = {SPACE}
    yield Conversation(asking(server.write_config(tmp_path_factory.mktemp("api") / "kubeconfig"))).hold()
    server.close()


def comparable(node: Any) -> Any:
    """Return an answer without the differences between versions of real servers.

    Since 1.27 a refused apply names the object in brackets. Lists of verbs have no order.
    """
    if isinstance(node, dict):
        return {key: sorted(value) if key == "verbs" else comparable(value) for key, value in node.items()}
    if isinstance(node, list):
        return [comparable(item) for item in node]
    return re.sub(r"(typed patch object) \([^)]*\)", r"\1", node) if isinstance(node, str) else node


def test_there_are_recordings_of_real_servers() -> None:
    assert RECORDED


@pytest.mark.parametrize("recording", RECORDED, ids=lambda path: path.stem)
def test_the_emulation_answers_as_the_recorded_server(recording: Path, emulated: dict[str, Answer]) -> None:
    real = json.loads(recording.read_text())
    assert real
    different = {}
    for what, (status, body) in real.items():
        here = [emulated[what].status, comparable(settled(emulated[what].body))]
        if here != [status, comparable(body)]:
            different[what] = {"real": [status, body], "emulated": here}
    assert different == {}

"""Whatever is changed in a checkpoint's files, with right or wrong hashes, loading gives the saved values or a readable refusal."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.checkpoint import store
from argosy.checkpoint.manifest import TrainProgress, finish, verify
from argosy.checkpoint.rank_grid import RankGrid, Spread
from argosy.checkpoint.store import load_into
from argosy.checkpoint.stored import SpreadTensor, StoredTensors, index_of
from argosy.checkpoint.tensors import TensorInfo, write_tensors
from argosy.errors import ArgosyError
from argosy.parallel.shards import Box

TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(6.0), "c": torch.tensor(3.0)}
NAME = "step-00000007"


# As versions of Argosy before grids of ranks wrote it.
LISTED = {
    "a": [(0, [0, 0], [2, 3]), (1, [2, 0], [2, 3])],
    "b": [(0, [0], [6])],
    "c": [(1, [], [])],
}


def listed_index() -> bytes:
    tensors = {
        group: {
            name: {
                "dtype": "F32",
                "shape": list(TENSORS[name].shape),
                "chunks": [
                    {"file": f"{group}-0000{rank}-of-00002.safetensors", "offset": offset, "shape": shape}
                    for rank, offset, shape in chunks
                ],
            }
            for name, chunks in LISTED.items()
        }
        for group in ("weights", "optimizer")
    }
    return json.dumps({"format": "argosy-tensors", "tensors": tensors}).encode()


def grid_index() -> bytes:
    both, halves = RankGrid(((0, 2),), ()), RankGrid(((0, 2),), ((2, 1),))
    spreads = {"a": (halves, (0,), 0), "b": (both, (), 0), "c": (both, (), 1)}
    tensors = {
        name: SpreadTensor(TensorInfo.of(TENSORS[name]), Spread(tuple(TENSORS[name].shape), grid, dims, writer))
        for name, (grid, dims, writer) in spreads.items()
    }
    return index_of({"weights": tensors, "optimizer": tensors}, 2)


@pytest.fixture(scope="module", params=[grid_index, listed_index])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as two ranks would write it: `a` in halves, the other tensors whole."""
    place = tmp_path_factory.mktemp("good") / NAME
    place.mkdir()
    files = {}
    for group in ("weights", "optimizer"):
        names = [f"{group}-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
        files[names[0]] = write_tensors(place / names[0], {"a[0:2,0:3]": TENSORS["a"][:2], "b": TENSORS["b"]})
        files[names[1]] = write_tensors(place / names[1], {"a[2:4,0:3]": TENSORS["a"][2:], "c": TENSORS["c"]})
    finish(place, TrainProgress(7, 56), files, request.param())
    return place


def load(place: Path) -> None:
    """Load the checkpoint, and check that it is refused cleanly or right to the last number."""
    into = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    try:
        found = verify(place)
        load_into(found.weights(), into, place)
        found.optimizer().check()
    except ArgosyError as error:
        code = error.code
    else:
        code = None
    assert code in (None, "checkpoint.corrupt", "checkpoint.mismatch", "checkpoint.version")
    assert code or all(torch.equal(into[name], tensor) for name, tensor in TENSORS.items())


def test_tensors_are_read_in_pieces_of_whole_rows(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PIECE", 24)  # two rows of `a`
    read, read_box = list[tuple[str, tuple[int, ...]]](), StoredTensors.read_box

    def noted(stored: StoredTensors, name: str, box: Box) -> torch.Tensor:
        read.append((name, box.shape))
        return read_box(stored, name, box)

    monkeypatch.setattr(StoredTensors, "read_box", noted)
    into = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    load_into(verify(good).weights(), into, good)
    assert sorted(read) == [("a", (2, 3)), ("a", (2, 3)), ("b", (6,)), ("c", ())]
    assert all(torch.equal(into[name], tensor) for name, tensor in TENSORS.items())


def rehash(place: Path) -> None:
    """Make the manifest right for the files that exist, as an attacker would."""
    path = place / "manifest.json"
    document = json.loads(path.read_text())
    for name in document["files"]:
        if (place / name).is_file():
            content = (place / name).read_bytes()
            document["files"][name] = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    path.write_text(json.dumps(document))


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(leaf for key, child in children for leaf in leaves(child, (*path, key)))]


STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from(["../x.safetensors", "/etc/passwd", "weights-00000-of-00002.safetensors", "F64", "BF16", [], {}, [0, 0], [4, 3], [2, 3]]),
)  # fmt: skip


def change(document: Any, data: st.DataObject) -> Any:
    """Return a JSON document with one part replaced, removed or duplicated."""
    document = copy.deepcopy(document)
    path = data.draw(st.sampled_from(leaves(document)))
    if not path:
        return data.draw(STRANGE)
    home = document
    for key in path[:-1]:
        home = home[key]
    how = data.draw(st.sampled_from(["replace", "drop", "repeat"]))
    if how == "replace":
        home[path[-1]] = data.draw(STRANGE)
    elif how == "drop":
        del home[path[-1]]
    elif isinstance(home, list):
        home.append(copy.deepcopy(home[path[-1]]))
    else:
        home[data.draw(st.text(max_size=6))] = copy.deepcopy(home[path[-1]])
    return document


Fuzz = Callable[[Path, st.DataObject], None]


def documents(place: Path, data: st.DataObject) -> None:
    file = place / data.draw(st.sampled_from(["manifest.json", "tensors.json", "state.json"]))
    file.write_text(json.dumps(change(json.loads(file.read_text()), data)))


def header(place: Path, data: st.DataObject) -> None:
    file = place / data.draw(st.sampled_from([f"weights-0000{rank}-of-00002.safetensors" for rank in (0, 1)]))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = json.dumps(change(json.loads(content[8 : 8 + length]), data)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def some_bytes(place: Path, data: st.DataObject) -> None:
    """Change bytes of the files that say where numbers lie. Any change of a number itself would be valid."""
    file = place / data.draw(
        st.sampled_from(["manifest.json", "tensors.json", "state.json", "weights-00000-of-00002.safetensors"])
    )
    content = bytearray(file.read_bytes())
    end = len(content) if file.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
    first = data.draw(st.integers(0, end - 1))
    content[first : first + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    file.write_bytes(content)


def places(place: Path, data: st.DataObject) -> None:
    file = place / data.draw(st.sampled_from(sorted(path.name for path in place.iterdir())))
    how = data.draw(st.sampled_from(["gone", "link", "directory", "pickle", "empty"]))
    content = file.read_bytes()
    file.unlink()
    if how == "link":
        (place.parent / "elsewhere").write_bytes(content)
        file.symlink_to(place.parent / "elsewhere")
    elif how == "directory":
        file.mkdir()
    elif how != "gone":
        file.write_bytes(b"\x80\x04cos\nsystem\n." if how == "pickle" else b"")


@pytest.mark.parametrize("fuzz", [documents, header, some_bytes, places])
@pytest.mark.parametrize("hashes", ["as they were", "made right"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_checkpoint_is_refused_or_loads_right(
    tmp_path_factory: pytest.TempPathFactory, good: Path, fuzz: Fuzz, hashes: str, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("fuzz") / NAME
    shutil.copytree(good, place)
    fuzz(place, data)
    if hashes == "made right":
        try:
            rehash(place)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            # The manifest itself is no longer valid.
            return
    load(place)

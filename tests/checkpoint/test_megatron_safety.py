"""A Megatron checkpoint cannot run code, reach outside its directory or load wrong numbers. Its pickles are never run, and any
change of its files is refused or has no effect."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from argosy.checkpoint.megatron.import_megatron import import_megatron
from argosy.checkpoint.megatron.pickles import PickledObject, UnreadableError, read_pickle
from argosy.checkpoint.megatron.torch_dist import TorchDist
from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve_model
from argosy.errors import ArgosyError
from argosy.model.build import build_model
from argosy.parallel.shards import whole_box
from megatron_files import arguments_of, megatron_state, write_checkpoint

SPEC = resolve_model(
    {"family": "llama", "layers": 2, "hidden": 8, "heads": 2, "ffn": 6, "vocab_size": 10, "max_seq_len": 8}
)
WEIGHTS = {
    name: torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    for number, (name, p) in enumerate(build_model(SPEC, "meta").named_parameters())
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("megatron") / "run"
    state = megatron_state(SPEC, WEIGHTS, stacked=True, padded=16)
    write_checkpoint(place, state, files=2, arguments=arguments_of(SPEC, 16))
    return place


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """Copy a good checkpoint. Returns the directory of the iteration."""
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run" / "iter_0000100"


class _Reduced:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def _touch(path: Path) -> str:
    return f'touch "{path}"'


# Each attack makes a pickle that, when unpickled, creates the file at the given path.
ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda path: pickle.dumps(_Reduced(__import__("os").system, (_touch(path),))),
    "eval": lambda path: pickle.dumps(_Reduced(eval, (f"open({str(path)!r}, 'w')",))),
    "protocol 0": lambda path: f"cposix\nsystem\n(S'{_touch(path)}'\ntR.".encode(),
    "inst": lambda path: f"(S'{_touch(path)}'\niposix\nsystem\n.".encode(),
    "obj": lambda path: f"(cposix\nsystem\nS'{_touch(path)}'\no.".encode(),
    "getattr": lambda path: (
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntRS'__call__'\ntR"
        + f"(S'{_touch(path)}'\ntR.".encode()
    ),
    "getattr of an allowed name": lambda path: (
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'__init__.__globals__'\ntR"
        + f"(S'{_touch(path)}'\ntR.".encode()
    ),
    "state": lambda path: (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(tR(S'x'\ncposix\nsystem\n"
        + f"(S'{_touch(path)}'\ntRdb.".encode()
    ),
    "dict key": lambda path: pickle.dumps({_Reduced(__import__("os").system, (_touch(path),)): 1}),
    "import alone": lambda path: b"ctripwire\nanything\n.",
}


def _as_metadata(place: Path, attack: bytes) -> None:
    (place / ".metadata").write_bytes(attack)


def _as_common(place: Path, attack: bytes) -> None:
    _replace_pickle(place / "common.pt", 0, (place / "common.pt").stat().st_size, attack)


def _as_tensor(place: Path, attack: bytes) -> None:
    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301 - our own
    length = next(
        w.length for i, w in metadata.storage_data.items() if w.relative_path == "__0_0.distcp" and w.offset == 0
    )
    size = _replace_pickle(place / "__0_0.distcp", 0, length, attack)
    for where in metadata.storage_data.values():
        if where.relative_path == "__0_0.distcp":
            where.length, where.offset = (
                (size, 0) if where.offset == 0 else (where.length, where.offset + size - length)
            )
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def _replace_pickle(path: Path, offset: int, length: int, content: bytes) -> int:
    """Replace data.pkl in an archive within a file. Returns the archive's new length."""
    whole = path.read_bytes()
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole[offset : offset + length])) as old, zipfile.ZipFile(made, "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, content if member.filename.endswith("data.pkl") else old.read(member))
    path.write_bytes(whole[:offset] + made.getvalue() + whole[offset + length :])
    return len(made.getvalue())


@pytest.mark.parametrize("into", [_as_metadata, _as_common, _as_tensor])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_that_means_harm_is_refused_and_not_obeyed(
    attack: str, into: Callable[[Path, bytes], None], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = tmp_path / "harm"
    (tmp_path / "tripwire.py").write_text(f"open({str(harm)!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    content = ATTACKS[attack](harm)
    into(copy, content)
    with pytest.raises(ArgosyError) as refused:
        import_megatron(f"megatron:{copy}", tmp_path / "ours")
    assert refused.value.code in ("megatron.unsafe", "megatron.bad-files")
    assert not harm.exists()
    assert "tripwire" not in sys.modules
    assert not (tmp_path / "ours").exists()
    if attack in ("os.system", "protocol 0"):
        assert "posix.system" in refused.value.cause


@pytest.mark.parametrize(
    "attack", [name for name in ATTACKS if name not in ("state", "getattr of an allowed name", "import alone", "inst")]
)
def test_the_attacks_are_real(attack: str, tmp_path: Path) -> None:
    """Python's own unpickler runs the same bytes and creates the file."""
    # Errors after the harm do not matter.
    with contextlib.suppress(Exception):
        pickle.loads(ATTACKS[attack](tmp_path / "harm"))  # noqa: S301
    assert (tmp_path / "harm").exists()


def test_names_and_calls_stay_notes() -> None:
    content = pickle.dumps({"args": _Reduced(eval, ("1 + 1",)), "n": [1, 2.5, "x", None, (True, b"y")], "s": {3}})
    value = read_pickle(content, lambda name: True)
    note = value.pop("args")
    assert isinstance(note, PickledObject)
    assert (note.what.dotted, note.args) == ("builtins.eval", ("1 + 1",))
    assert value == {"n": [1, 2.5, "x", None, (True, b"y")], "s": {3}}


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
        | st.sets(st.integers()) | st.frozensets(st.text()),
    ),
    st.integers(0, 5),
)  # fmt: skip
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    # Older protocols write bytes and sets by calling functions.
    if protocol < 4:
        value = repr(value)
    assert read_pickle(pickle.dumps(value, protocol), lambda name: False) == value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_read_or_refused(content: bytes) -> None:
    with contextlib.suppress(UnreadableError):
        read_pickle(content, lambda name: True)


@pytest.mark.parametrize("name", ["../{}", "/{}", "sub/{}", "{}\0", ".{}", "link.distcp", "missing.distcp", 7, None])
def test_files_are_plain_names_in_the_directory(name: Any, copy: Path, tmp_path: Path) -> None:
    for place in (copy.parent / "__0_0.distcp", tmp_path / "__0_0.distcp"):
        shutil.copy(copy / "__0_0.distcp", place)
    (copy / "link.distcp").symlink_to(copy / "__0_0.distcp")
    absolute = str(tmp_path / "__0_0.distcp")
    metadata = pickle.loads((copy / ".metadata").read_bytes())  # noqa: S301 - our own
    for where in metadata.storage_data.values():
        if where.relative_path == "__0_0.distcp":
            where.relative_path = (
                (absolute if name == "/{}" else name.format("__0_0.distcp")) if isinstance(name, str) else name
            )
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ArgosyError) as refused:
        TorchDist(copy)
    assert refused.value.code == "megatron.bad-files"


@pytest.mark.parametrize("file", [".metadata", "common.pt", "__1_0.distcp"])
def test_links_are_not_followed(file: str, copy: Path, tmp_path: Path) -> None:
    (copy / file).rename(tmp_path / "elsewhere")
    (copy / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArgosyError, match="link"):
        import_megatron(f"megatron:{copy}", tmp_path / "ours")


def _describe(copy: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((copy / ".metadata").read_bytes())  # noqa: S301 - our own
    change(metadata)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))


NORM = "decoder.final_layernorm.weight"


def _chunks(metadata: Any) -> list[Any]:
    found: list[Any] = metadata.state_dict_metadata[NORM].chunks
    return found


def _first(metadata: Any) -> _StorageInfo:
    found: _StorageInfo = metadata.storage_data[dcp.MetadataIndex(NORM, (0,))]
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda m: _chunks(m).pop(),
        lambda m: _chunks(m).append(_chunks(m)[0]),
        lambda m: setattr(_chunks(m)[0], "sizes", torch.Size([9])),
        lambda m: setattr(_chunks(m)[0], "sizes", (-1,)),
        lambda m: setattr(_chunks(m)[0], "sizes", (1.0,)),
        lambda m: setattr(_chunks(m)[0], "offsets", torch.Size([1, 1])),
        lambda m: setattr(m.state_dict_metadata[NORM], "size", torch.Size([2**60])),
        lambda m: setattr(m.state_dict_metadata[NORM].properties, "dtype", torch.float16),
        lambda m: setattr(m.state_dict_metadata[NORM].properties, "dtype", torch.int8),
        lambda m: setattr(_first(m), "length", 10**9),
        lambda m: setattr(_first(m), "offset", -1),
        lambda m: setattr(_first(m), "offset", _first(m).offset + 1),
        lambda m: setattr(_first(m), "transform_descriptors", ["zstd"]),
        lambda m: m.storage_data.pop(dcp.MetadataIndex(NORM, (0,))),
        lambda m: setattr(m, "storage_data", None),
        lambda m: setattr(m, "state_dict_metadata", {"x": 1}),
    ],
)
def test_a_description_that_its_files_do_not_bear_out_is_refused(change: Any, copy: Path, tmp_path: Path) -> None:
    _describe(copy, change)
    with pytest.raises(ArgosyError) as refused:
        import_megatron(f"megatron:{copy}", tmp_path / "ours")
    assert refused.value.code == "megatron.bad-files"


def test_a_changed_number_is_found_by_its_checksum(copy: Path, tmp_path: Path) -> None:
    content = bytearray((copy / "__1_0.distcp").read_bytes())
    row = struct.pack("<f", float(next(iter(WEIGHTS.values())).flatten()[0]))
    at = content.find(row)
    if at < 0:
        content = bytearray((copy / "__0_0.distcp").read_bytes())
        at = content.find(row)
    content[at] ^= 1
    for file in ("__0_0.distcp", "__1_0.distcp"):
        if len(content) == (copy / file).stat().st_size:
            (copy / file).write_bytes(content)
    with pytest.raises(ArgosyError, match="checksum"):
        import_megatron(f"megatron:{copy}", tmp_path / "ours")


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_whatever_is_changed_the_weights_are_right_or_refused(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(good, place / "run")
    file = (
        place
        / "run"
        / "iter_0000100"
        / data.draw(st.sampled_from([".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp"]))
    )
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "remove"]))
        if kind == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut" and at:
            del content[at:]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif len(content) > 1:
            del content[at]
    file.write_bytes(content)
    code = None
    try:
        import_megatron(f"megatron:{place / 'run'}", place / "ours", changes=["vocab_size=10"])
    except ArgosyError as error:
        code = error.code
    shutil.rmtree(place / "run")
    assert code is None or code.startswith(("megatron.", "config."))
    assert (code is None) == (place / "ours").exists()
    if code is not None:
        return
    found = latest(place / "ours" / "checkpoints", report=lambda text: None)
    assert found is not None
    assert all(torch.equal(found.weights()[name], weight) for name, weight in WEIGHTS.items())


def test_the_numbers_are_those_that_were_saved(good: Path) -> None:
    stored = TorchDist(good / "iter_0000100")
    for name, tensor in megatron_state(SPEC, WEIGHTS, stacked=True, padded=16).items():
        assert torch.equal(stored.read_box(name, whole_box(tuple(tensor.shape))), tensor)


# Opening a FIFO may block for ever.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
def test_a_fifo_is_refused_and_not_waited_for(file: str, copy: Path, tmp_path: Path) -> None:
    (copy / file).unlink(missing_ok=True)
    os.mkfifo(copy / file)
    with pytest.raises(ArgosyError) as refused:
        import_megatron(f"megatron:{copy}", tmp_path / "ours", changes=["vocab_size=10"])
    assert file in refused.value.cause


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    weights["norm.weight"][2] = float("nan")
    state = megatron_state(SPEC, weights, stacked=True, padded=16)
    write_checkpoint(tmp_path / "run", state, arguments=arguments_of(SPEC, 16))
    with pytest.raises(ArgosyError, match=r"norm.weight holds 1 numbers of 8 that are NaN"):
        import_megatron(f"megatron:{tmp_path / 'run'}", tmp_path / "ours", changes=["vocab_size=10"])
    assert not (tmp_path / "ours").exists()

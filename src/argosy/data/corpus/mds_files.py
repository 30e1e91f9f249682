"""Read the files of an MDS data set: its index, and the verified, decompressed bytes of each shard.

The files are untrusted: names that lead out of the directory are refused, and decompression stops at the declared size. Every
listed hash that can be computed is checked. zstd, gz and bz2 always work; br, snappy and the xxhash family need a package,
which the error names.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from argosy.errors import ArgosyError
from argosy.untrusted import MIB, open_regular, read_regular

INDEX = "index.json"
# The size limit of a shard: its offsets are u32.
MOST_BYTES = 1 << 32
COMPRESSIONS = ("br", "bz2", "gz", "snappy", "zstd")


def _inside(name: str) -> str:
    """Validate a relative path below the directory. Merged data sets name shards in subdirectories."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise ValueError(f"{name!r} leads out of the directory")
    return name


class FileFacts(BaseModel):
    """Name, size and hashes of one file, as index.json lists them."""

    model_config = ConfigDict(frozen=True)
    basename: Annotated[str, AfterValidator(_inside)]
    bytes: Annotated[int, Field(ge=0, lt=MOST_BYTES)]
    hashes: dict[str, str]


class ShardFacts(BaseModel):
    """One shard entry of index.json, with the field names of the format."""

    model_config = ConfigDict(frozen=True)
    version: Literal[2]
    format: Literal["mds"]
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    compression: str | None
    hashes: list[str]
    raw_data: FileFacts
    zip_data: FileFacts | None
    samples: Annotated[int, Field(ge=0)]
    size_limit: int | str | None


class _Index(BaseModel):
    version: Literal[2]
    shards: list[ShardFacts]


def bad_mds(path: Path, what: str, fix: str = "copy the file again, or make the data set again") -> ArgosyError:
    """Return a `data.bad-mds` error."""
    return ArgosyError("data.bad-mds", f"{path}: {what}", fix=fix)


def read_index(directory: Path) -> list[ShardFacts]:
    """Read and validate index.json."""
    path = directory / INDEX
    try:
        return _Index.model_validate_json(read_regular(path, 1024 * MIB)).shards
    except OSError as error:
        splits = sorted(str(found.parent) for found in directory.glob(f"*/{INDEX}"))
        raise ArgosyError(
            "data.not-found",
            f"{path} cannot be read: {error.strerror}",
            fix=f"give one split: {', '.join(splits)}" if splits else "give the directory that holds index.json",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise bad_mds(path, f"{where}: {first['msg']}") from None


def read_shard(directory: Path, shard: ShardFacts) -> bytes:
    """Return the decompressed content of a shard, after checking its sizes and listed hashes."""
    raw = directory / shard.raw_data.basename
    if shard.zip_data is None or raw.exists():
        return _read_checked(raw, shard.raw_data)
    packed = directory / shard.zip_data.basename
    data = _decompress(packed, str(shard.compression), _read_checked(packed, shard.zip_data), shard.raw_data.bytes)
    if len(data) != shard.raw_data.bytes:
        raise bad_mds(packed, f"it does not decompress to the {shard.raw_data.bytes:,} bytes index.json declares")
    _check_hashes(packed, data, shard.raw_data.hashes)
    return data


def _read_checked(path: Path, facts: FileFacts) -> bytes:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size == facts.bytes else b""
    except OSError as error:
        raise bad_mds(path, f"it cannot be read: {error.strerror}", fix="copy the whole data set again") from None
    if size != facts.bytes:
        raise bad_mds(path, f"it has {size:,} bytes, index.json declares {facts.bytes:,}")
    _check_hashes(path, data, facts.hashes)
    return data


def _check_hashes(path: Path, data: bytes, hashes: dict[str, str]) -> None:
    """Check every listed hash that can be computed. If none can, the error names the package to install."""
    known = {name for name in hashes if name in hashlib.algorithms_available and not name.startswith("shake_")}
    for name in sorted(known) or sorted(hashes):
        if name in known:
            found = hashlib.new(name, data, usedforsecurity=False).hexdigest()
        else:
            found = _xxhash(path, name, data)
        if found != hashes[name]:
            raise bad_mds(path, f"its {name} is {found[:16]}…, index.json lists {hashes[name][:16]}…")


def _xxhash(path: Path, name: str, data: bytes) -> str:
    xxhash = _library("xxhash", "xxhash", f"{path}: its hash {name}")
    if name not in xxhash.algorithms_available:
        raise bad_mds(path, f"its hash algorithm {name} is unknown")
    return str(getattr(xxhash, name)(data).hexdigest())


def _decompress(path: Path, compression: str, packed: bytes, size: int) -> bytes:
    """Decompress at most one byte more than the declared size, as a defence against decompression bombs."""
    kind = compression.partition(":")[0]
    try:
        if kind == "zstd":
            import zstandard

            stream = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            return stream.read(size + 1)
        if kind == "gz":
            import gzip

            return gzip.GzipFile(fileobj=io.BytesIO(packed)).read(size + 1)
        if kind == "bz2":
            import bz2

            return bz2.BZ2File(io.BytesIO(packed)).read(size + 1)
        if kind == "br":
            return _unpack_brotli(_library("brotli", "brotli", f"{path}: its compression br"), packed, size)
        snappy = _library("snappy", "python-snappy", f"{path}: its compression snappy")
        return bytes(snappy.decompress(packed)) if _snappy_size(packed) == size else b""
    except ArgosyError:
        raise
    except Exception as error:  # noqa: BLE001 - each library has its own errors, all meaning damaged data
        raise bad_mds(path, f"it cannot be decompressed: {error}") from None


def _unpack_brotli(brotli: Any, packed: bytes, size: int) -> bytes:
    stream, out = brotli.Decompressor(), io.BytesIO()
    for at in range(0, len(packed), 4096):
        out.write(stream.process(packed[at : at + 4096]))
        if out.tell() > size:
            break
    return out.getvalue()


def _snappy_size(packed: bytes) -> int:
    """Return the decompressed size, which snappy stores before the data as a base-128 number."""
    size = 0
    for place, byte in enumerate(packed[:5]):
        size |= (byte & 127) << (7 * place)
        if byte < 128:
            break
    return size


def _library(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ArgosyError(
            "data.missing-extra", f"{purpose} needs the package {package}", fix=f"pip install {package}"
        ) from None

"""Reader and writer of the token column of MosaicML's MDS format, as written by MosaicML's own MDSWriter.

    DIR/index.json                 {"version": 2, "shards": [{columns, compression, hashes, raw_data, zip_data, …}]}
    DIR/shard.00000.mds[.zstd]     u32 samples; u32 offset of each sample and of the end; configuration as JSON; samples

A sample is the u32 size of each column of variable size, then the bytes of all columns in the order of their names. An
`ndarray:uint16` column holds a byte (dimensions << 2 | width of a dimension), the dimensions, the values.

The data is untrusted. Pickle columns are refused, because unpickling runs code. `argosy.data.corpus.mds_files` handles files,
hashes and compression.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.indexed import Tokens
from argosy.data.corpus.mds_files import COMPRESSIONS, INDEX, MOST_BYTES, ShardFacts, bad_mds, read_index, read_shard
from argosy.data.corpus.mds_types import check_type
from argosy.files import replace_file

# This much of a `bytes` column is enough to check its dtype.
_ENOUGH_BYTES = 1 << 12
# The size limit of a shard before compression; MosaicML's default.
SIZE_LIMIT = 1 << 26  # bytes
_VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


class MdsReader:
    """A reader of the token column of an MDS data set. One shard is in memory at a time."""

    def __init__(
        self, directory: Path, *, column: str = "tokens", bytes_dtype: str = "int64", vocab_size: int | None = None
    ) -> None:
        self.directory, self.column, self.bytes_dtype = directory, column, bytes_dtype
        self.vocab_size = vocab_size
        self.shards = read_index(directory)
        for shard in self.shards:
            self._check(shard)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        """The size on disk that index.json declares."""
        return sum((shard.zip_data or shard.raw_data).bytes for shard in self.shards)

    @property
    def encoding(self) -> str:
        """The encoding of the token column in the first shard, such as `ndarray:uint16` or `bytes`. Other shards may differ."""
        return self._encoding(self.shards[0]) if self.shards else "bytes"

    def documents(self, advance: Callable[[float], None] = lambda _: None) -> Iterator[Tokens]:
        """Yield the tokens of each sample. `advance` receives the size of each finished shard, for progress."""
        # Samples of shards that are too small to check their dtype.
        unchecked: list[memoryview] = []
        for shard in self.shards:
            yield from self._samples(shard, unchecked)
            advance((shard.zip_data or shard.raw_data).bytes)

    def _encoding(self, shard: ShardFacts) -> str:
        return shard.column_encodings[shard.column_names.index(self.column)]

    def _check(self, shard: ShardFacts) -> None:
        path = self.directory / INDEX
        names = shard.column_names
        if not len(names) == len(shard.column_encodings) == len(shard.column_sizes):
            raise bad_mds(
                path, f"{shard.raw_data.basename} has {len(names)} columns, but not as many encodings and sizes"
            )
        for name, encoding in zip(names, shard.column_encodings, strict=True):
            if encoding == "pkl" or encoding.startswith("pkl:"):
                raise bad_mds(
                    path,
                    f"column {name!r} is pickled: reading it could run any code its author chose",
                    fix="have its owner write the data set again without the column",
                )
        if self.column not in names:
            raise bad_mds(path, f"it has no column {self.column!r}", fix=f"--column is one of {', '.join(names)}")
        if shard.compression is not None and shard.compression.partition(":")[0] not in COMPRESSIONS:
            raise bad_mds(path, f"compression {shard.compression!r} is not one of {', '.join(COMPRESSIONS)}")
        array_dtype(path, self.column, self._encoding(shard), self.bytes_dtype)

    def _samples(self, shard: ShardFacts, unchecked: list[memoryview]) -> Iterator[Tokens]:
        path = self.directory / shard.raw_data.basename
        encoding = self._encoding(shard)
        dtype, shape = array_dtype(path, self.column, encoding, self.bytes_dtype)
        values = list(self._values(path, shard))
        if encoding == "bytes" and dtype is not None:
            unchecked.extend(values)
            check_type(path, unchecked, dtype, self.vocab_size, self.column)
            if sum(len(value) for value in unchecked) >= _ENOUGH_BYTES:
                unchecked.clear()
        for number, value in enumerate(values):
            try:
                yield _decode(value, dtype, shape) if encoding != "bytes" else np.frombuffer(value, dtype)
            except ValueError as error:
                raise bad_mds(path, f"column {self.column!r} of sample {number}: {error}") from None

    def _values(self, path: Path, shard: ShardFacts) -> Iterator[memoryview]:
        """Yield the bytes of the token column of each sample."""
        data = read_shard(self.directory, shard)
        offsets = _offsets(path, data, shard.samples)
        place = shard.column_names.index(self.column)
        variable = [not size for size in shard.column_sizes]
        # The place of this column's size among the sizes at the head of a sample.
        slot = sum(variable[:place])
        heads = sum(variable)
        fixed_before = sum(size for size in shard.column_sizes[:place] if size)
        own_size = shard.column_sizes[place]
        sizes_at = struct.Struct(f"<{heads}I").unpack_from
        view = memoryview(data)
        for number, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            if end - start < 4 * heads:
                raise bad_mds(path, f"sample {number} has {end - start} bytes, too few for the sizes of its columns")
            sizes = sizes_at(view, start)
            begin = start + 4 * heads + fixed_before + sum(sizes[:slot])
            if begin + (own_size or sizes[slot]) > end:
                raise bad_mds(path, f"column {self.column!r} of sample {number} reaches past the end of the sample")
            yield view[begin : begin + (own_size or sizes[slot])]


def array_dtype(
    path: Path, column: str, encoding: str, bytes_dtype: str
) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Return (dtype, shape) of a token column; each is None if the encoding does not fix it."""
    kind, *details = encoding.split(":")
    name = bytes_dtype if encoding == "bytes" else details[0] if details else None
    if kind not in ("bytes", "ndarray") or len(details) > 2 or (name is not None and name not in _INTEGERS):
        raise bad_mds(
            path,
            f"column {column!r} is stored as {encoding!r}, not as whole numbers",
            fix="give the column of token ids with --column: `bytes` or `ndarray` of an integer type",
        )
    try:
        shape = tuple(int(size) for size in details[1].split(",")) if len(details) == 2 else None
    except ValueError:
        raise bad_mds(path, f"column {column!r} has the unreadable shape {details[1]!r}") from None
    return (None if name is None else np.dtype(name).newbyteorder("<")), shape


def _decode(value: memoryview, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> Tokens:
    """Decode an `ndarray` value. The dtype and shape precede the values if the encoding does not fix them."""
    at = 0
    if dtype is None:
        code = value[0] if len(value) else -1
        if code not in _VALUE_TYPES:
            raise ValueError(f"value type {code} is not a whole number")
        dtype, at = np.dtype(_VALUE_TYPES[code]), 1
    if shape is None:
        if len(value) <= at:
            raise ValueError("it ends before its dimensions")
        count, width = value[at] >> 2, 1 << (value[at] & 3)
        first, at = at + 1, at + 1 + count * width
        shape = tuple(int.from_bytes(value[place : place + width], "little") for place in range(first, at, width))
    values = np.frombuffer(value[at:], dtype)
    if math.prod(shape) != len(values):
        raise ValueError(f"{len(values)} values do not fill the shape {shape}")
    if len(values) != max(shape, default=1):
        raise ValueError(f"shape {shape} is more than one row of tokens")
    return values


def _offsets(path: Path, data: bytes, samples: int) -> npt.NDArray[np.int64]:
    head = 4 + 4 * (samples + 1)
    if len(data) < head or int.from_bytes(data[:4], "little") != samples:
        raise bad_mds(path, f"it does not hold the {samples:,} samples index.json declares")
    offsets = np.frombuffer(data, "<u4", samples + 1, 4).astype(np.int64)
    if offsets[0] < head or (np.diff(offsets) < 0).any() or offsets[-1] != len(data):
        raise bad_mds(path, "its table of samples does not fit its size")
    return offsets


class MdsWriter:
    """A writer of one token column that gives the bytes of MosaicML's MDSWriter. `finish` writes index.json."""

    def __init__(
        self,
        directory: Path,
        *,
        encoding: str,
        column: str = "tokens",
        bytes_dtype: str = "int64",
        zstd_level: int | None = None,
        hashes: Sequence[str] = ("sha256",),
        size_limit: int = SIZE_LIMIT,
    ) -> None:
        dtype, _ = array_dtype(directory, column, encoding, bytes_dtype)
        if encoding == "ndarray" or encoding.count(":") > 1 or dtype is None:
            raise ValueError(f"{encoding} can be read but not written")
        self.directory, self.dtype, self.is_array = directory, dtype, encoding != "bytes"
        self.zstd_level, self.hashes, self.size_limit = zstd_level, sorted(hashes), size_limit
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": None if zstd_level is None else f"zstd:{zstd_level}",
            "hashes": self.hashes,
            "size_limit": size_limit,
            "column_names": [column],
            "column_encodings": [encoding],
            "column_sizes": [None],
        }
        self._config_text = json.dumps(self._config, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._size = 8 + len(self._config_text)
        self.shards: list[dict[str, Any]] = []

    def add(self, tokens: Tokens) -> None:
        """Append one sample. An array without values is refused, because MosaicML's readers do not support it."""
        if self.is_array and not len(tokens):
            raise ValueError("an MDS array cannot be empty")
        if len(tokens) and int(tokens.max()) > np.iinfo(self.dtype).max:
            raise bad_mds(
                self.directory, f"the id {int(tokens.max()):,} does not fit in {self.dtype.name}", fix="a wider type"
            )
        data = np.ascontiguousarray(tokens, self.dtype).tobytes()
        if self.is_array:
            width = 0 if len(tokens) < 1 << 8 else 1 if len(tokens) < 1 << 16 else 2
            data = bytes((1 << 2 | width,)) + len(tokens).to_bytes(1 << width, "little") + data
        sample = len(data).to_bytes(4, "little") + data
        if self._samples and self._size + len(sample) + 4 > self.size_limit:
            self._flush()
        self._samples.append(sample)
        self._size += len(sample) + 4
        if self._size >= MOST_BYTES:
            raise bad_mds(self.directory, "one document has 4 GiB, more than MDS can hold", fix="use --seq-len")

    def finish(self) -> None:
        """Write the last shard and index.json."""
        if self._samples:
            self._flush()
        index = {"version": 2, "shards": self.shards}
        replace_file(self.directory / INDEX, json.dumps(index, sort_keys=True).encode(), sync=True)

    def _flush(self) -> None:
        sizes = np.array([0, *(len(sample) for sample in self._samples)])
        offsets = np.cumsum(sizes) + 4 + 4 * len(sizes) + len(self._config_text)
        head = len(self._samples).to_bytes(4, "little") + offsets.astype("<u4").tobytes()
        raw = b"".join((head, self._config_text, *self._samples))
        name = f"shard.{len(self.shards):05d}.mds"
        facts: dict[str, Any] = {"samples": len(self._samples), "raw_data": self._facts(raw, name), "zip_data": None}
        if self.zstd_level is not None:
            import zstandard

            name, raw = name + ".zstd", zstandard.ZstdCompressor(self.zstd_level).compress(raw)
            facts["zip_data"] = self._facts(raw, name)
        replace_file(self.directory / name, raw, sync=True)
        self.shards.append(facts | self._config)
        self._samples, self._size = [], 8 + len(self._config_text)

    def _facts(self, data: bytes, name: str) -> dict[str, Any]:
        hashes = {algorithm: hashlib.new(algorithm, data).hexdigest() for algorithm in self.hashes}
        return {"basename": name, "bytes": len(data), "hashes": hashes}

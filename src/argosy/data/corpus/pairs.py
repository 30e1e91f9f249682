"""Locate the `.bin/.idx` pairs of a corpus without opening them.

The commands on finished data (inspect, verify, merge, convert) take a corpus directory with a manifest, the prefix of one
Megatron pair, or a plain directory of pairs such as Megatron's tools write. The files are not opened here, because `verify`
must be able to name a pair that is damaged or incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from argosy.data.corpus.corpus import Corpus, open_corpus
from argosy.data.corpus.corpus_manifest import FILE_NAME, Manifest, read_manifest
from argosy.data.corpus.indexed import IndexedReader, bin_path, idx_path
from argosy.errors import ArgosyError


@dataclass(frozen=True)
class Pairs:
    """The `.bin/.idx` pairs under a path, with the manifest if there is one."""

    path: Path
    prefixes: list[Path]
    manifest: Manifest | None


def find_pairs(path: Path) -> Pairs:
    """Find the pairs under `path`, in manifest order. In a plain directory they are sorted by name, which is Megatron's order."""
    if (path / FILE_NAME).exists():
        manifest = read_manifest(path)
        return Pairs(path, [path / shard.name for shard in manifest.shards], manifest)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if bin_path(prefix).is_file() or idx_path(prefix).is_file():
        return Pairs(prefix, [prefix], None)
    if (path / ".parts").exists():
        raise ArgosyError(
            "data.bad-manifest",
            f"{path} is an unfinished `argosy data prepare`",
            fix="run the same `argosy data prepare` again: it resumes where it stopped",
        )
    if path.is_dir():
        prefixes = sorted({file.with_suffix("") for ending in ("bin", "idx") for file in path.glob(f"*.{ending}")})
        if prefixes:
            return Pairs(path, prefixes, None)
        raise ArgosyError(
            "data.not-found",
            f"{path} holds neither a {FILE_NAME} nor a .bin/.idx pair",
            fix="give a directory made by `argosy data prepare`, or the prefix of a Megatron pair",
        )
    raise ArgosyError(
        "data.not-found", f"there is no {path} and no {idx_path(prefix)}", fix="check the path: a prefix has no ending"
    )


def open_pairs(path: Path) -> Corpus:
    """Open the pairs under `path` for reading."""
    pairs = find_pairs(path)
    if pairs.manifest is not None:
        return open_corpus(path)
    return Corpus(pairs.path, [IndexedReader(prefix) for prefix in pairs.prefixes], None)

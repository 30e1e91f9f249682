"""A benchmark of `argosy data prepare` on real text from this machine, compared with other tools on the same text.

    python benchmarks/prepare.py TOKENIZER.json [MEGABYTES]

It makes a corpus of at least 150 MB (Python sources, documentation, headers: whatever text the machine has, in a random but fixed
order) as .jsonl, .jsonl.zst and .parquet, also repeated ten times, prepares each with two workers, and prints MB of JSONL per
second: over the whole command, and without start-up (measured with an input just large enough for workers). It shows the best of
three runs, and the highest peak memory: the sampled sum of the resident sizes of all processes. On a busy machine CPU seconds tell
more than seconds.

The peers are a plain Hugging Face `encode_batch` pipeline, and the design of Megatron's tool (a pool of two processes that send
lists of ids to megatron-core's builder), on an eighth of the text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOTS = (
    "/usr/lib/python3",
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/include",
    "/usr/share/perl",
    "/usr/lib",
    "/usr/local/lib",
    "/root",
    "/home",
)
SUFFIXES = (".py", ".txt", ".md", ".rst", ".h", ".pm", ".html", ".js", ".rs", ".pyi", ".gz", "copyright")


def texts() -> Iterator[str]:
    paths = sorted(
        {
            Path(directory, name)
            for root in (sys.prefix, *ROOTS)
            for directory, _, names in os.walk(root)
            for name in names
            if name.endswith(SUFFIXES)
        }
    )
    random.Random(0).shuffle(paths)
    seen = set()
    for path in paths:
        try:
            if path.is_symlink() or path.stat().st_size > 400_000:
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = raw.decode()
        except (OSError, UnicodeDecodeError, EOFError):
            continue
        digest = hashlib.md5(raw).digest()
        if len(text) > 200 and "\x00" not in text and digest not in seen:
            seen.add(digest)
            yield text


def make_corpus(directory: Path, megabytes: int) -> tuple[int, list[Path]]:
    """Return the bytes of JSONL, and the corpus in each format."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    lines, kept, size = directory / "corpus.jsonl", [], 0
    with lines.open("wb") as file:
        for number, text in enumerate(texts()):
            kept.append(text)
            size += file.write(json.dumps({"text": text}, ensure_ascii=number % 2 == 0).encode() + b"\n")
            if size > megabytes * 1e6:
                break
    compressed = directory / "corpus.jsonl.zst"
    with lines.open("rb") as source, compressed.open("wb") as target:
        zstandard.ZstdCompressor(level=3).copy_stream(source, target)
    table = directory / "corpus.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": kept}), table, compression="zstd")
    return size, [lines, compressed, table]


def repeat(path: Path, times: int) -> Path:
    """Write the same text several times into one file: as consecutive zstd frames, or consecutive row groups."""
    import pyarrow.parquet

    target = path.with_name(path.name.replace("corpus", "repeated"))
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        with pyarrow.parquet.ParquetWriter(target, table.schema, compression="zstd") as writer:
            for _ in range(times):
                writer.write_table(table)
    else:
        with target.open("wb") as file:
            for _ in range(times):
                file.write(path.read_bytes())
    return target


def resident(pid: int) -> int:
    """Return the resident bytes of a process and all its descendants."""
    total = 0
    try:
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):
        pass
    return total


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*arguments: str) -> tuple[float, float, float]:
    """Run a command and return (seconds, CPU seconds, peak MB) of all its processes."""
    started, cpu_before, peak = time.perf_counter(), cpu_seconds(), 0
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{arguments} failed with {process.returncode}")
    return time.perf_counter() - started, cpu_seconds() - cpu_before, peak / 1e6


PLAIN = """
import sys, orjson, numpy as np
from tokenizers import Tokenizer
t = Tokenizer.from_file(sys.argv[1]); out = open(sys.argv[3], "wb")
with open(sys.argv[2], "rb") as f:
    while lines := f.readlines(8 << 20):
        for e in t.encode_batch_fast([orjson.loads(l)["text"] for l in lines], add_special_tokens=False):
            out.write(np.array(e.ids, np.uint16).tobytes())
"""


MEGATRON = """
import sys, json, multiprocessing, numpy as np, torch
from tokenizers import Tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
def start():
    global tokenizer
    tokenizer = Tokenizer.from_file(sys.argv[1])
def encode(line):
    return tokenizer.encode(json.loads(line)["text"]).ids + [50256]
if __name__ == "__main__":
    builder = IndexedDatasetBuilder(sys.argv[3] + ".bin", dtype=np.uint16)
    with multiprocessing.Pool(2, initializer=start) as pool, open(sys.argv[2]) as lines:
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(sys.argv[3] + ".idx")
"""


def main(tokenizer: str, megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        size, inputs = make_corpus(directory, megabytes)
        lines = inputs[0].read_bytes().splitlines(keepends=True)

        def some(name: str, count: int) -> Path:
            (directory / name).write_bytes(b"".join(lines[:count]))
            return directory / name

        def prepare(path: Path) -> tuple[float, float, float]:
            output = directory / "out"
            shutil.rmtree(output, ignore_errors=True)
            verb = ["-m", "argosy", "data", "prepare", str(path)]
            return run(*verb, "--tokenizer", tokenizer, "--output", str(output), "--workers", "2")

        def best(path: Path, times: int = 3) -> tuple[float, float, float]:
            seconds, cpu, peak = zip(*(prepare(path) for _ in range(times)), strict=True)
            return min(seconds), min(cpu), max(peak)

        def show(name: str, of: float, seconds: float, cpu: float, peak: float, start: float = 0.0) -> None:
            rates = f"{of / seconds:>8.1f}{of / max(0.01, seconds - start):>11.1f}"
            print(f"{name:<36}{of:>7.0f}{seconds:>9.2f}{cpu:>8.2f}{rates}{peak:>9.0f}", flush=True)

        ten = best(some("ten.jsonl", 10), 5)[0]
        start = best(some("small.jsonl", next(n for n in range(len(lines)) if sum(map(len, lines[:n])) > 4.3e6)), 5)[0]
        print(f"{len(lines):,} documents; ten of them {ten:.2f} s, start-up with workers {start:.2f} s\n")
        print(f"{'pipeline':<36}{'MB':>7}{'seconds':>9}{'CPU s':>8}{'MB/s':>8}{'MB/s work':>11}{'peak MB':>9}")
        for times in (1, 10):
            for path in inputs:
                chosen = path if times == 1 else repeat(path, times)
                show(f"argosy {''.join(path.suffixes)}", size * times / 1e6, *best(chosen), start=start)
                if chosen != path:
                    chosen.unlink()
        eighth = some("eighth.jsonl", len(lines) // 8)
        for name, script in (("tokenizers encode_batch", PLAIN), ("as Megatron's tool, its builder", MEGATRON)):
            (directory / "other.py").write_text(script)
            taken = run(str(directory / "other.py"), tokenizer, str(eighth), str(directory / "other"))
            show(name, eighth.stat().st_size / 1e6, *taken)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 160)

"""`argosy data prepare` against a plain Hugging Face `encode_batch` pipeline, on real text from this machine, side by side.

    python benchmarks/prepare.py TOKENIZER.json [MEGABYTES]

Makes a corpus of at least 150 MB (Python sources, documentation, headers: whatever text the machine has) as .jsonl,
.jsonl.zst and .parquet, prepares each with two workers, and prints MB of JSONL a second: over the whole command, and
over the work alone (without the start, taken from a tiny input). Peak memory is the sum over all processes, sampled.
The last row repeats the corpus ten times, to show that memory does not follow its size.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
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
    seen = set()
    for root in (sys.prefix, *ROOTS):
        for directory, _, names in os.walk(root):
            for name in names:
                path = Path(directory, name)
                if not name.endswith(SUFFIXES) or path.is_symlink():
                    continue
                try:
                    if path.stat().st_size > 400_000:
                        continue
                    raw = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
                    text = raw.decode()
                except (OSError, UnicodeDecodeError, EOFError):
                    continue
                digest = hashlib.md5(raw).digest()
                if len(text) > 200 and "\x00" not in text and digest not in seen:
                    seen.add(digest)
                    yield text


def make_corpus(directory: Path, megabytes: int) -> tuple[int, list[Path]]:
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


def resident(pid: int) -> int:
    """Bytes of a process and all its descendants."""
    total = 0
    try:
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):
        pass
    return total


def run(*arguments: str) -> tuple[float, float]:
    """(seconds, peak MB over all processes)"""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{arguments} failed with {process.returncode}")
    return time.perf_counter() - started, peak / 1e6


PLAIN = """
import sys, orjson, numpy as np
from tokenizers import Tokenizer
t = Tokenizer.from_file(sys.argv[1]); out = open(sys.argv[3], "wb")
with open(sys.argv[2], "rb") as f:
    while lines := f.readlines(8 << 20):
        for e in t.encode_batch_fast([orjson.loads(l)["text"] for l in lines], add_special_tokens=False):
            out.write(np.array(e.ids, np.uint16).tobytes())
"""


def main(tokenizer: str, megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        size, inputs = make_corpus(directory, megabytes)
        tiny = directory / "tiny.jsonl"
        tiny.write_bytes((b'{"text": "' + b"x " * 5000 + b'"}\n') * 450)  # just enough for processes to be started
        output = directory / "out"

        def prepare(path: Path, *more: str) -> tuple[float, float]:
            shutil.rmtree(output, ignore_errors=True)
            return run(
                "-m",
                "argosy",
                "data",
                "prepare",
                str(path),
                "--tokenizer",
                tokenizer,
                "--output",
                str(output),
                "--workers",
                "2",
                *more,
            )

        start, _ = prepare(tiny)
        print(f"corpus {size / 1e6:.0f} MB of JSONL; start-up and a tiny input {start:.2f} s\n")
        print(f"{'pipeline':<28}{'seconds':>9}{'MB/s':>8}{'MB/s work':>11}{'peak MB':>9}")
        rows: list[tuple[str, Path]] = [(f"argosy {''.join(path.suffixes)}", path) for path in inputs]
        ten = directory / "ten.jsonl"
        with ten.open("wb") as file:
            for _ in range(10):
                file.write(inputs[0].read_bytes())
        rows.append(("argosy .jsonl, ten times", ten))
        for name, path in rows:
            seconds, peak = min(prepare(path) for _ in range(1 if path == ten else 3))
            mega = size / 1e6 * (10 if path == ten else 1)
            print(
                f"{name:<28}{seconds:>9.2f}{mega / seconds:>8.1f}{mega / max(0.01, seconds - start):>11.1f}{peak:>9.0f}",
                flush=True,
            )
        seconds, peak = run("-c", PLAIN, tokenizer, str(inputs[0]), str(directory / "plain.bin"))
        print(
            f"{'Hugging Face encode_batch':<28}{seconds:>9.2f}{size / 1e6 / seconds:>8.1f}{size / 1e6 / seconds:>11.1f}{peak:>9.0f}"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 160)

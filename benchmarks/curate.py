"""A benchmark of `argosy data curate` beside datatrove's local executor, and of its near-duplicates beside brute force.

    python benchmarks/curate.py TOKENIZER.json [--megabytes 40] [--rounds 3] [--peer-rounds 1] [--text DIR] [--only throughput|search]

Throughput: documents of plain sentences, from the documentation and docstrings on this machine or below DIR, as two JSONL files. Two
pipelines, each with two workers, by both programs in turn, also on a sixth of the text ("work" is without start-up, from the
difference): the filters of Gopher and FineWeb with JSON lines as output; and the same filters with MinHash near-duplicates and tokens as
output. datatrove splits words with the rule that we have, a regular expression; its own English splitter is NLTK's, which is slower and
needs a download. Its n-grams are hashed with SHA-1, because it does not work with xxhash 4. Before that the rules alone are compared in
one process, by CPU time. It shows the best of the rounds. On a busy machine CPU seconds tell more than seconds.

Near-duplicates: 100,000 documents of random words, with copies edited to every similarity from 0.4 to 1. All pairs with a common
5-gram are compared exactly (a sparse matrix product, which equals brute force: other pairs have similarity 0).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

FILTERS = ["gopher_quality", "gopher_repetition", "fineweb_quality"]
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
SENTENCE = re.compile(r"(?<=[.!?])\s+")


def sentences(text: str) -> Iterator[str]:
    for line in text.split("\n\n"):
        for sentence in SENTENCE.split(" ".join(line.split())):
            words = sentence.split()
            plain = sum(word.strip(".,;:()!?\"'").isalpha() for word in words)
            if len(words) > 5 and plain >= 0.85 * len(words) and sentence.endswith((".", "!", "?")):
                yield sentence


def found_sentences(roots: Sequence[str]) -> list[str]:
    """Return the different sentences of the documentation and docstrings below some directories."""
    names = (Path(where, name) for root in roots for where, _, found in os.walk(root) for name in found)
    paths = sorted({path for path in names if path.suffix in (".py", ".rst", ".md", ".txt")})
    random.Random(0).shuffle(paths)
    # A sentence that many files share would make all documents repeat themselves.
    seen: dict[str, None] = {}
    for path in paths:
        try:
            text = path.read_text() if path.stat().st_size < 400_000 else ""
        except (OSError, UnicodeDecodeError):
            continue
        if path.suffix == ".py":
            text = "\n\n".join(textwrap.dedent(found) for found in DOCSTRING.findall(text) if len(found) > 200)
        seen |= dict.fromkeys(sentences(text))
    return list(seen)


def make_corpus(directory: Path, megabytes: float, roots: Sequence[str]) -> list[Path]:
    """Write two JSONL files of documents of 1 to 6 kB. If the sentences do not suffice, they come again in another order."""
    rng = random.Random(0)
    files = [directory / "a.jsonl", directory / "b.jsonl"]
    known = found_sentences(roots)
    with files[0].open("w") as first, files[1].open("w") as second:
        size, at = 0, 0
        while size < megabytes * 1e6:
            kept: list[str] = []
            limit = rng.randrange(1000, 6000)
            while sum(map(len, kept)) <= limit:
                if at == len(known):
                    rng.shuffle(known)
                    at = 0
                kept.append(known[at])
                at += 1
            paragraphs = [" ".join(kept[start : start + 4]) for start in range(0, len(kept), 4)]
            target = first if size % 2 else second
            size += target.write(json.dumps({"text": "\n".join(paragraphs)}) + "\n")
    return files


DATATROVE = """
import re, sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

class Words(WordTokenizer):
    expression = re.compile(r"\\w+|[^\\w\\s]+")
    def word_tokenize(self, text): return self.expression.findall(text)
    def sent_tokenize(self, text): return [text]
    def span_tokenize(self, text): return [(0, len(text))]

source, work, tokenizer = sys.argv[1:]
words = Words()
def run(pipeline, name, tasks=2):
    # Processes that are forked start fastest, and their CPU time is that of this process's children.
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=min(tasks, 2), start_method="fork", logging_dir=f"{work}/logs/{name}").run()
if __name__ == "__main__":
    filters = [GopherQualityFilter(language=words), GopherRepetitionFilter(language=words), FineWebQualityFilter(language=words)]
    read = JsonlReader(source, glob_pattern="*.jsonl")
    run([read, *filters, JsonlWriter(f"{work}/kept", output_filename="${rank}.jsonl", compression=None)], "filter")
    if tokenizer:
        config = MinhashConfig(n_grams=5, num_buckets=20, hashes_per_bucket=6, hash_config=HashConfig(hash_fc="sha1"))
        again = JsonlReader(f"{work}/kept", glob_pattern="*.jsonl")
        run([again, MinhashDedupSignature(f"{work}/sig", config, language=words)], "sig")
        run([MinhashDedupBuckets(f"{work}/sig", f"{work}/buckets", config=config)], "buckets", 20)
        run([MinhashDedupCluster(f"{work}/buckets", f"{work}/ids", config=config)], "cluster", 1)
        tokens = DocumentTokenizer(f"{work}/tokens", tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>")
        run([again, MinhashDedupFilter(f"{work}/ids"), tokens], "tokens")
"""


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*command: str) -> tuple[float, float]:
    """Run a command and return (seconds, CPU seconds)."""
    started, before = time.perf_counter(), cpu_seconds()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - started, cpu_seconds() - before


def throughput(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "source")
        source.mkdir()
        files = make_corpus(source, options.megabytes, options.text)
        size = sum(file.stat().st_size for file in files) / 1e6
        documents = sum(file.read_bytes().count(b"\n") for file in files)
        print(f"{documents:,} documents, {size:.1f} MB of JSONL, load average {os.getloadavg()[0]:.1f}", flush=True)
        rules(files, 2, options.rounds)
        script = Path(name, "by_datatrove.py")
        script.write_text(DATATROVE)
        few = Path(name, "few")
        few.mkdir()
        for file in files:
            lines = file.read_bytes().splitlines(keepends=True)
            (few / file.name).write_bytes(b"".join(lines[: len(lines) // 6]))
        small = sum(file.stat().st_size for file in few.iterdir()) / 1e6
        times: dict[str, list[tuple[float, float, float, float]]] = {}
        for turn in range(options.rounds):
            for full in (False, True):
                label = "filters, near-duplicates, tokens" if full else "filters"
                for whose, command in (("argosy", ours), ("datatrove", theirs)):
                    if whose == "datatrove" and turn >= options.peer_rounds:
                        continue
                    tokenizer = options.tokenizer if full else ""
                    runs = [command(Path(name), source_of, f"{turn}", tokenizer) for source_of in (few, source)]
                    times.setdefault(f"{whose}: {label}", []).append((*runs[0], *runs[1]))
                    print(f"round {turn}, {whose}: {label}: {runs[1][0]:.1f} s, {runs[1][1]:.1f} CPU s", flush=True)
        print(
            "| pipeline | seconds | CPU s | MB/s | MB/s, work | MB per CPU s, work |\n| --- | --- | --- | --- | --- | --- |"
        )
        for label, measured in times.items():
            few_s, few_cpu, seconds, cpu = (min(column) for column in zip(*measured, strict=True))
            work = (size - small) / (seconds - few_s), (size - small) / (cpu - few_cpu)
            print(
                f"| {label} | {seconds:.1f} | {cpu:.1f} | {size / seconds:.1f} | {work[0]:.1f} | {work[1]:.2f} |",
                flush=True,
            )


def ours(place: Path, source: Path, turn: str, tokenizer: str) -> tuple[float, float]:
    pipeline: dict[str, Any] = {"inputs": [str(source)], "steps": list(FILTERS)}
    if tokenizer:
        pipeline |= {"steps": [*FILTERS, "near_duplicates"], "tokenizer": tokenizer}
    pipeline["output"] = str(place / f"ours-{source.name}-{turn}-{bool(tokenizer)}")
    path = place / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline))
    return run("-m", "argosy", "data", "curate", str(path), "--workers", "2")


def theirs(place: Path, source: Path, turn: str, tokenizer: str) -> tuple[float, float]:
    work = place / f"theirs-{source.name}-{turn}-{bool(tokenizer)}"
    return run(str(place / "by_datatrove.py"), str(source), str(work), tokenizer)


def rules(files: list[Path], megabytes: float, rounds: int) -> None:
    """Compare the rules alone, in this process: CPU seconds for the same documents, and whether the same ones are kept."""
    from datatrove.data import Document

    from argosy.data.curate.curation_step import step_class
    from argosy.data.curate.text_batch import TextBatch

    lines = files[0].read_bytes()[: int(megabytes * 1e6)].splitlines()[:-1]
    texts = [json.loads(line)["text"] for line in lines]
    size = sum(len(text.encode()) for text in texts) / 1e6
    steps = [step_class(name)() for name in FILTERS]
    scope: dict[str, Any] = {}
    exec(DATATROVE.partition("source, work")[0], scope)  # noqa: S102 - the text above
    words = scope["Words"]()
    blocks = [
        scope[name](language=words)
        for name in ("GopherQualityFilter", "GopherRepetitionFilter", "FineWebQualityFilter")
    ]

    def ours() -> list[str]:
        kept: list[str] = []
        for at in range(0, len(texts), 150):
            batch = TextBatch(texts[at : at + 150])
            for step in steps:
                batch.alive[list(step.apply(batch).removed)] = False
            kept += [batch.texts[number] for number in batch.living()]
        return kept

    def theirs() -> list[str]:
        return [text for text in texts if all(block.filter(Document(text=text, id="")) is True for block in blocks)]

    seconds: dict[str, float] = {}
    # The tables of characters are made once.
    ours()
    for _ in range(rounds):
        found = []
        for judge in (ours, theirs):
            started = time.process_time()
            found.append(judge())
            seconds[judge.__name__] = min(seconds.get(judge.__name__, np.inf), time.process_time() - started)
        if found[0] != found[1]:
            raise SystemExit("the two keep different documents")
    print(
        f"rules alone, {len(texts):,} documents, {size:.1f} MB: {size / seconds['ours']:.1f} MB and {size / seconds['theirs']:.2f} MB "
        f"per CPU second, {seconds['theirs'] / seconds['ours']:.1f} times datatrove's blocks; {len(found[0]):,} documents kept by both"
    )


def edited_documents(count: int, rng: np.random.Generator) -> list[Any]:
    """Return documents as arrays of word numbers: two thirds are random, the others copies with edits."""
    frequency = 1 / np.arange(10, 4096 + 10)
    made: list[Any] = []
    while len(made) < count:
        if rng.random() < 0.66 or not made:
            made.append(rng.choice(4096, rng.integers(50, 400), p=frequency / frequency.sum()))
            continue
        copy = made[rng.integers(max(0, len(made) - 5000), len(made))].copy()
        edits = rng.random(len(copy)) < rng.random() * 0.1
        copy[edits] = rng.integers(0, 4096, int(edits.sum()))
        made.append(copy[rng.integers(0, 1 + len(copy) // 20) :])
    return made


def exact_pairs(documents: list[Any], threshold: float) -> set[tuple[int, int]]:
    """Return the pairs whose sets of 5-grams have at least this Jaccard similarity."""
    sparse = importlib.import_module("scipy.sparse")
    grams = [
        np.unique(sum(d[i : len(d) - 4 + i].astype(np.int64) << (12 * i) for i in range(5))) if len(d) > 4 else d[:0]
        for d in documents
    ]
    rows = np.repeat(np.arange(len(grams)), [len(g) for g in grams])
    _, columns = np.unique(np.concatenate(grams), return_inverse=True)
    matrix = sparse.csr_matrix((np.ones(len(rows), np.int32), (rows, columns)))
    common = sparse.triu(matrix @ matrix.T, 1).tocoo()
    sizes = np.array([len(g) for g in grams])
    union = sizes[common.row] + sizes[common.col] - common.data
    found = common.data >= threshold * union
    return set(zip(common.row[found].tolist(), common.col[found].tolist(), strict=True))


def near_duplicates(count: int) -> None:
    from argosy.data.curate import duplicate_search as search
    from argosy.data.curate.near_duplicates import Step
    from argosy.data.curate.text_batch import TextBatch

    documents = edited_documents(count, np.random.default_rng(0))
    letters = [chr(97 + i) for i in range(16)]
    words = np.array([letters[i >> 8] + letters[i >> 4 & 15] + letters[i & 15] for i in range(4096)])
    started, step = time.perf_counter(), Step()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sizes = []
        for at in range(0, count, 1000):
            chunk = [" ".join(words[document]) for document in documents[at : at + 1000]]
            search.write_marks(directory, f"{at:08d}", [step.mark(TextBatch(chunk))])
            sizes.append(len(chunk))
        disk = sum(path.stat().st_size for path in directory.iterdir())
        names = tuple(f"{at:08d}" for at in range(0, count, 1000))
        search.JobParts(names, tuple(sizes)).write(directory)
        marked = time.perf_counter()
        for tasks in search.searches(directory, [step]):
            for task in tasks:
                task.run()
        pairs = np.concatenate([np.fromfile(path, "<u8") for path in sorted(directory.glob("confirmed-*"))])
        removed = search.decide(directory, [step]).documents
        ended = time.perf_counter()
    found = {(int(pair >> np.uint64(32)), int(pair & np.uint64(0xFFFFFFFF))) for pair in pairs}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    true = exact_pairs(documents, step.threshold)
    right = len(found & true)
    late = {second for _, second in true}
    print(
        f"{count:,} documents: {len(true):,} true pairs, {len(found):,} found; precision {right / len(found):.4f}, recall {right / len(true):.4f}\n"
        f"documents removed: {len(removed):,} of {len(late):,} that have an earlier duplicate; "
        f"{len(late & set(removed.tolist())) / len(late):.4f} of them\n"
        f"marks {marked - started:.1f} s, search {ended - marked:.1f} s, {disk / count:.0f} bytes of marks a document, peak {memory:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1)
    system = (sys.prefix, "/usr/share/doc", "/usr/lib/python3", "/usr/local/lib", "/usr/lib")
    parser.add_argument("--text", nargs="+", default=system, metavar="DIR")
    parser.add_argument("--only", choices=("throughput", "search"))
    options = parser.parse_args()
    if options.only != "throughput":
        near_duplicates(100_000)
    if options.only != "search":
        throughput(options)


if __name__ == "__main__":
    main()

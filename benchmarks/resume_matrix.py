"""A check of bit-equal resume on this machine's device: each kind of run is trained, its last checkpoint deleted, and resumed.

    python benchmarks/resume_matrix.py [CASE …] [--device cuda] [--together 8]

The corpus is the standard library's own sources as bytes. Cases run in parallel. For each case the script prints whether the
resumed run is bit-equal to the uninterrupted one, and its first and last loss.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEPS = 6
SPEC = {
    "model": {
        "family": "llama",
        "layers": 2,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "vocab_size": 272,
        "dropout": 0.1,
    },
    "data": {"train": "corpus", "seq_len": 256, "split": [90, 10, 0]},
    "train": {"global_batch": 16, "steps": STEPS},
    "parallel": {"micro_batch": 8},
    "optim": {"lr": 1e-3, "warmup": 2},
    "eval": {"every": 3, "batches": 1},
    "checkpoint": {"every": 3},
    "log": {"every": 1},
}
# FlexAttention and torch.compile do not support dropout here.
STILL = "model.dropout=0"
EXPERTS = "model.moe={experts: 8, top_k: 2, ffn: 256, router: sigmoid, bias_rate: 0.001, shared_experts: 1}"
CASES: dict[str, list[str]] = {
    "default precision": [],
    "one micro-batch": ["parallel.micro_batch=16"],
    "fp32": ["train.precision=fp32"],
    "fp16": ["train.precision=fp16"],
    "fp8": ["train.precision=fp8"],
    "muon": ["optim.name=muon"],
    "batch ramp-up": ["train.batch_rampup={start: 8, increment: 8, samples: 16}"],
    "document mask": ["data.document_mask=true", STILL],
    "ALiBi": ["model.family=mpt", "model.kv_heads=4", STILL],
    "window": ["model.window=64", STILL],
    "qk-norm": ["model.qk_norm=true"],
    "experts": [EXPERTS],
    "experts fp16": [EXPERTS, "train.precision=fp16"],
    "recompute selective": ["parallel.recompute=selective"],
    "recompute full": ["parallel.recompute=full"],
    "compile block": ["parallel.compile=block", STILL],
    "compile model": ["parallel.compile=model", STILL],
}


def argosy(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "argosy", *arguments], cwd=cwd, check=False, capture_output=True, text=True
    )


def run_case(name: str, root: Path, device: str) -> str:
    run = root / "runs" / name.replace(" ", "-")
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    hashes = []
    for _ in range(2):
        done = argosy("train", "run.yaml", f"name={run.name}", f"train.device={device}", *CASES[name], cwd=root)
        if done.returncode or not last.is_dir():
            return f"{name:20} FAILED with exit code {done.returncode}\n{(done.stderr or done.stdout)[-1500:]}"
        hashes.append([hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(last.glob("*.safetensors"))])
        shutil.rmtree(last)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if "loss" in r][:STEPS]
    verdict = "bit-equal" if hashes[0] == hashes[1] else "DIFFERENT BITS"
    return f"{name:20} {verdict:14} loss {losses[0]:.4f} to {losses[-1]:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--together", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        sources = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:60]
        lines = [json.dumps({"text": Path(p).read_text(errors="ignore")}) for p in sources]
        (root / "texts.jsonl").write_text("\n".join(lines) + "\n")
        argosy("data", "prepare", "texts.jsonl", "--tokenizer", "bytes", "--output", "corpus", cwd=root)
        # JSON is YAML too.
        (root / "run.yaml").write_text(json.dumps(SPEC))
        with ThreadPoolExecutor(options.together) as pool:
            for line in pool.map(lambda name: run_case(name, root, options.device), options.cases or CASES):
                print(line, flush=True)


if __name__ == "__main__":
    main()

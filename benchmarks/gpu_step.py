"""A benchmark of training steps on one GPU: Argosy's own kernels, fp8 matmuls, and the same model with torch.compile.

    python benchmarks/gpu_step.py [CASE …] [--steps 20] [--json FILE]

Each case runs in its own process, one after the other on the same GPU, so that their ratios are comparable. The `compiled` cases
are the plain PyTorch form of the same model under torch.compile, with the same optimiser.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

GPT2 = ["model.preset=gpt2-large", "model.vocab_size=50304", "data.seq_len=1024", "train.global_batch=32"]
LLAMA = ["model.preset=llama3-1b", "data.seq_len=8192", "train.global_batch=4"]
LLAMA_8B = ["model.preset=llama3-8b", "model.layers=8", "data.seq_len=8192", "train.global_batch=2"]
MPT = ["model.preset=mpt-1b-alibi", "data.seq_len=2048", "train.global_batch=16"]
MOE = ["model.preset=moe-3.5b-a1.1b", "data.seq_len=4096", "train.global_batch=8"]
COMPILED = ["parallel.compile=model"]
CASES = {
    "gpt2-large": GPT2,
    "gpt2-large compiled": [*GPT2, *COMPILED],
    "gpt2-large fp8": [*GPT2, "train.precision=fp8"],
    "gpt2-large deterministic": [*GPT2, "train.deterministic=true"],
    "gpt2-large selective": [*GPT2, "parallel.recompute=selective"],
    "gpt2-large full": [*GPT2, "parallel.recompute=full"],
    "llama3-1b": LLAMA,
    "llama3-1b deterministic": [*LLAMA, "train.deterministic=true"],
    "llama3-1b compiled": [*LLAMA, *COMPILED],
    "llama3-1b fp8": [*LLAMA, "train.precision=fp8"],
    "llama3-8b shape": LLAMA_8B,
    "llama3-8b shape deterministic": [*LLAMA_8B, "train.deterministic=true"],
    "mpt-1b": MPT,
    "moe": MOE,
}


def run_case(name: str, steps: int) -> dict[str, object]:
    from argosy.config.resolve import resolve
    from argosy.measure.step_bench import bench

    batch = next(o.split("=")[1] for o in CASES[name] if o.startswith("train.global_batch"))
    common = ["data.train=synthetic", "optim.lr=1e-4", "eval=off", f"train.steps={steps}", "train.deterministic=false"]
    spec = resolve(None, [*common, *CASES[name], f"parallel.micro_batch={batch}"]).spec
    result = bench(spec, steps=steps, warmup=5)
    print("\n".join(result.lines()), flush=True)
    return result.as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        with open(options.json, "w") as file:
            json.dump(run_case(options.alone, options.steps), file)
        return
    results = {}
    for name in options.cases or CASES:
        print(f"\n== {name}", flush=True)
        target = f"/tmp/argosy-gpu-step-{os.getpid()}.json"
        command = [sys.executable, __file__, "--alone", name, "--steps", str(options.steps), "--json", target]
        if subprocess.run(command, check=False).returncode == 0:
            with open(target) as file:
                results[name] = json.load(file)
    print(f"\n{'case':24} {'step ms':>9} {'best':>8} {'MFU':>7} {'GiB':>7} {'floor':>8} {'step/floor':>10}")
    for name, r in results.items():
        print(
            f"{name:24} {r['step_ms']:9.1f} {min(r['steps_ms']):8.1f} {r['mfu'] or 0:7.1%} {r['memory_gib']['peak']:7.2f} "
            f"{r['floor_ms']:8.1f} {r['over_floor'] or 0:10.2f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

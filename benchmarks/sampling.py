"""A benchmark of generation: tokens/s of `argosy sample`'s path beside transformers' `generate`, for the same weights and prompts.

    python benchmarks/sampling.py [--device cuda] [--dtype bf16] [--rounds 5] [--tokens 64] [--prompt 64] [--cpu-time] [--json]

Each model is made with random weights, exported to Hugging Face's format and loaded by both sides. They take turns, so that other
load on the machine affects both alike, and each counts with its fastest round (bar: at least as many tokens/s). Decoding is greedy
and without a stop token; both sides must write the same tokens in 32-bit floats. The time includes reading the prompt. With
--cpu-time the CPU seconds of the process count instead of wall time, for a busy machine, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable

import torch
import transformers

from argosy.infer.loading import load_model
from argosy.model.decoding import Sampling, generate
from argosy.model.kv_cache import CachedTexts

MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2 (124M)": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    "llama (8M)": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=1024,
        )
    ),
}  # fmt: skip
BATCHES = (1, 8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(name: str, batch: int, asked: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        MODELS[name]().save_pretrained(directory)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[asked.dtype])
        theirs = theirs.eval().to(asked.device)
        ours = load_model(f"hf:{directory}", device=asked.device, precision=asked.dtype, writes=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, theirs.config.vocab_size, (batch, asked.prompt), generator=generator)
    options = Sampling(tokens=asked.tokens, temperature=0.0)

    def run_theirs() -> list[list[int]]:
        found = theirs.generate(
            prompts.to(asked.device), attention_mask=torch.ones_like(prompts).to(asked.device), do_sample=False,
            max_new_tokens=asked.tokens, min_new_tokens=asked.tokens, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return found[:, asked.prompt :].tolist()

    def run_ours() -> list[list[int]]:
        most = asked.prompt + asked.tokens
        texts = CachedTexts(ours.model, limit=ours.source.model.max_seq_len, most=most, device=ours.device)
        with torch.inference_mode():
            return generate(texts, prompts.tolist(), options, stop=None)

    best = {run_theirs: float("inf"), run_ours: float("inf")}
    clock = time.process_time if asked.cpu_time else time.perf_counter
    written = {run: run() for run in best}
    for _ in range(asked.rounds):
        for run in best:
            began = clock()
            run()
            best[run] = min(best[run], clock() - began)
    speeds = [batch * asked.tokens / best[run] for run in (run_ours, run_theirs)]
    return {
        "model": name, "batch": batch, "argosy": speeds[0], "transformers": speeds[1], "ratio": speeds[0] / speeds[1],
        "same_tokens": written[run_ours] == written[run_theirs],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write after each prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds instead of wall time")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    where = (
        torch.cuda.get_device_name()
        if asked.device == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )
    print(f"{where}, {asked.dtype}, torch {torch.__version__}, transformers {transformers.__version__}")
    if not asked.json:
        print(
            f"{'model':<12} {'batch':>5} {'argosy tok/s':>13} {'transformers tok/s':>19} {'ratio':>6} {'same tokens':>12}"
        )
    for name in MODELS:
        for batch in BATCHES:
            row = measure(name, batch, asked)
            if asked.json:
                print(json.dumps(row))
            else:
                print(
                    f"{name:<12} {batch:>5} {row['argosy']:>13.1f} {row['transformers']:>19.1f} {row['ratio']:>6.2f} "
                    f"{'yes' if row['same_tokens'] else 'no':>12}"
                )


if __name__ == "__main__":
    main()

"""The run of the scenario tests: small enough for CPU pods, long enough to be disturbed after its first checkpoint."""

from __future__ import annotations

from typing import Any

STEPS, SAVED_EVERY = 400, 50
TARGETS = ("indexed-job", "jobset", "pytorchjob", "trainjob")
# A shell command that prints the documents of the corpus.
TEXT = """seq 400 | sed 's/.*/{"text": "This is sentence number & of a very small corpus."}/'"""
MOUNT = "/data"


def e2e_spec(name: str, target: str, image: str, namespace: str, claim: str) -> dict[str, Any]:
    """Return the run spec of a scenario. Two pods of one rank each train with dropout, whose masks a resumed run must redraw."""
    return {
        "name": name,
        "model": {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab_size": 257, "dropout": 0.1},
        "data": {
            "tokenizer": "bytes",
            "train": [{"path": "corpus", "prepare": {"inputs": ["text.jsonl"], "shards": 2}}],
            "split": [100, 0, 0],
            "seq_len": 64,
        },
        "train": {"global_batch": 8, "steps": STEPS, "precision": "fp32", "seed": 7},
        "optim": {"lr": 1.0e-3, "warmup": 2},
        "parallel": {"dp_replicate": 2, "micro_batch": 2},
        "eval": "off",
        "checkpoint": {"every": f"{SAVED_EVERY}ba", "keep": 2},
        "log": {"every": 1},
        "cluster": {
            "target": target,
            "nodes": 2,
            "gpus": 0,
            "cpus": 1,
            "memory": "2Gi",
            "shm": "256Mi",
            "scratch": "1Gi",
            "image": image,
            "namespace": namespace,
            "storage": {"claim": claim, "mount": MOUNT},
            "grace": "60s",
            "data": {"count": 1, "cpus": 1, "memory": "1Gi"},
        },
    }


def chart_values(name: str, image: str, namespace: str, claim: str) -> dict[str, Any]:
    """Return the chart's values for the same run, with a viewer that reads the volume."""
    run = e2e_spec(name, "indexed-job", image, namespace, claim)
    # Helm lays values over the chart's own, whose run is for GPUs; null removes a key.
    run["cluster"]["instance"] = None
    return {"run": run, "conductor": {"cpu": "250m"}, "tensorboard": {"enabled": True}}

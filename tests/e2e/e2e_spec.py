"""The run of the scenario tests: small enough for CPU pods, long enough to be disturbed after its first checkpoint."""

from __future__ import annotations

import os
from typing import Any

# Ten seconds or more pass between the first checkpoint and the end on a fast core: time to find the pods and to disturb them.
STEPS, SAVED_EVERY = int(os.environ.get("ARGOSY_E2E_STEPS", "1000")), 50
TARGETS = ("indexed-job", "jobset", "pytorchjob", "trainjob")
# A shell command that prints the documents of the corpus.
TEXT = """seq 400 | sed 's/.*/{"text": "This is sentence number & of a very small corpus."}/'"""
MOUNT = "/data"
# Two ranks, each in a pod of its own unless the node has too few cores.
NODES = int(os.environ.get("ARGOSY_E2E_NODES", "2"))


def e2e_spec(name: str, target: str, image: str, namespace: str, claim: str) -> dict[str, Any]:
    """Return the run spec of a scenario. Two ranks train with dropout, whose masks a resumed run must redraw."""
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
            "nodes": NODES,
            "ranks": 2 // NODES,
            "gpus": 0,
            "cpus": 1,
            "memory": "2Gi",
            "shm": "256Mi",
            "scratch": "1Gi",
            "image": image,
            # The node may have it under this name, and no registry.
            "pull_policy": "IfNotPresent",
            "namespace": namespace,
            "storage": {"claim": claim, "mount": MOUNT},
            "grace": "60s",
            # Sums have the same order in one pod of two ranks as in two pods of one.
            "env": {"OMP_NUM_THREADS": "1"},
            "data": {"count": 1, "cpus": 1, "memory": "1Gi"},
        },
    }


def chart_values(name: str, image: str, namespace: str, claim: str) -> dict[str, Any]:
    """Return the chart's values for the same run, with a viewer that reads the volume."""
    run = e2e_spec(name, "indexed-job", image, namespace, claim)
    # Helm lays values over the chart's own, whose run is for GPUs; null removes a key.
    run["cluster"]["instance"] = None
    # One pod, because the conductor and the viewer want cores too.
    run["cluster"] |= {"nodes": 1, "ranks": 2}
    viewer = {"enabled": True, "cpu": "50m", "memory": "512Mi"}
    return {"run": run, "conductor": {"cpu": "200m", "memory": "512Mi"}, "tensorboard": viewer}

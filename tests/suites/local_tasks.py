"""Small tasks of lm-evaluation-harness with local data: one of each kind of request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

WORDS = ["red", "blue", "green", "a long grey", "teal"]


def write_tasks(directory: Path, samples: int = 9) -> Path:
    """Write task files and their data. Data files are named relative to the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {
            "question": f"colour {n}{' of the sky' * (n % 3)}?",
            "choices": [WORDS[(n + k) % 5] for k in range(3)],
            "label": n % 3,
            "letter": "abc"[n % 3],
            "text": f"{WORDS[n % 5]} and {WORDS[(n + 1) % 5]} " * (1 + n % 4),
        }
        for n in range(samples)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test"}
    tasks: dict[str, dict[str, Any]] = {
        "colours": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}\nAnswer:", "doc_to_choice": "{{choices}}",
            "doc_to_target": "label", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        # Continuations of one token after one context, which share a forward pass.
        "letters": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": ["a", "b", "c"],
            "doc_to_target": "{{letter}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
        },
        "writing": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 9, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
        "perplexing": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }  # fmt: skip
    for name, task in tasks.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | data | task))
    return directory


NAMES = ["colours", "letters", "writing", "perplexing"]

"""A run spec under construction from another trainer's configuration: its keys, notes, and settings without a counterpart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass
class Draft:
    """The keys so far (`tree`), `notes` on settings that Argosy expresses differently, and settings without a counterpart (`left`)."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        node = self.tree
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value

    def get(self, key: str, default: Any = None) -> Any:
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def text(self, source: str) -> str:
        """Return the run.yaml, with notes and settings without a counterpart as comments at the top."""
        head = [f"# Made from {source}."]
        head += [f"# note: {note}" for note in self.notes]
        head += [f"# no counterpart: {item}" for item in self.left]
        order = (
            "name",
            "runs_dir",
            "model",
            "init_from",
            "data",
            "train",
            "optim",
            "parallel",
            "eval",
            "checkpoint",
            "log",
        )
        tree = {key: self.tree[key] for key in order if key in self.tree} | self.tree
        return "\n".join(head) + "\n" + yaml.safe_dump(tree, sort_keys=False, width=120, default_flow_style=None)

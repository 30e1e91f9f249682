"""The output of `argosy config`: the run spec and the presets as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from argosy.config.counts import FLOPS_CONVENTION, count_parameters, training_flops_per_token
from argosy.config.reference import keys
from argosy.config.resolve import resolve, resolve_model
from argosy.families.family_registry import ALIASES, PRESETS
from argosy.tasks.task_registry import run_flops_per_token


def resolved(path: Path | None, overrides: Sequence[str], as_json: bool) -> str:
    found = resolve(path, overrides)
    spec = found.spec
    counts = count_parameters(spec.model)
    flops = run_flops_per_token(spec)
    steps = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len)
    facts: dict[str, Any] = {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "flops_per_token": flops,
        "flops_convention": FLOPS_CONVENTION,
        # With a batch ramp: the tokens at full batch size.
        "tokens_per_step": spec.train.global_batch * spec.data.seq_len,
        "steps": steps,
    }
    if as_json:
        values = {key: {"value": value, "origin": origin} for key, value, origin in found.rows()}
        return json.dumps({"values": values, "facts": facts}, indent=2)
    lines = columns([("key", "value", "origin"), *((key, _text(value), origin) for key, value, origin in found.rows())])
    lines += [
        "",
        f"parameters       {counts.total:,}" + (f" ({counts.active:,} active)" if counts.active < counts.total else ""),
    ]
    lines += [f"training FLOPs   {flops:.4g} a token ({FLOPS_CONVENTION})"]
    lines += [f"tokens a step    {facts['tokens_per_step']:,}"]
    lines += [f"steps            {'known once the data is opened' if steps is None else f'{steps:,}'}"]
    return "\n".join(lines)


def defaults(as_json: bool) -> str:
    rows = list(keys())
    if as_json:
        return json.dumps(
            {key: {"type": kind, "default": default, "help": text} for key, kind, default, text in rows}, indent=2
        )
    return "\n".join(
        columns([("key", "default", "meaning"), *((key, default, text) for key, _, default, text in rows)])
    )


def models(as_json: bool) -> str:
    rows = [_model_row(name) for name in PRESETS]
    if as_json:
        return json.dumps({"flops_convention": FLOPS_CONVENTION, "models": rows, "aliases": ALIASES}, indent=2)
    table = [("model", "layers", "hidden", "heads", "kv", "vocab", "seq", "parameters", "active", "FLOPs/token")]
    for row in rows:
        table.append(
            (
                row["name"],
                str(row["layers"]),
                str(row["hidden"]),
                str(row["heads"]),
                str(row["kv_heads"]),
                str(row["vocab_size"]),
                str(row["seq_len"]),
                _size(row["parameters"]),
                _size(row["active_parameters"]),
                f"{row['flops_per_token']:.3g}",
            )
        )
    lines = columns(table)
    aliases = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    return "\n".join(
        [*lines, "", f"aliases: {aliases}", f"FLOPs: training, {FLOPS_CONVENTION}, at the listed sequence length"]
    )


def _model_row(name: str) -> dict[str, Any]:
    spec = resolve_model(name)
    counts = count_parameters(spec)
    return {
        "name": name,
        "family": spec.family,
        "layers": spec.layers,
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "vocab_size": spec.vocab_size,
        "seq_len": spec.max_seq_len,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "flops_per_token": training_flops_per_token(spec),
    }


def _size(count: int) -> str:
    """Format a parameter count with at least three significant digits, like the labels of presets: 65 M, 356 M, 1.32 B."""
    millions = count / 1e6
    return f"{millions:,.0f} M" if millions < 1000 else f"{millions / 1000:,.4g} B"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

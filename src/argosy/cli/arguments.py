"""Arguments that several verbs take."""

from __future__ import annotations

from pathlib import Path

RUN_HELP = "The run spec (default: ./run.yaml), then any number of key.path=value overrides."


def run_and_overrides(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """`[RUN.yaml] [key=value ...]`: the first is a file unless it is an override."""
    rest = list(arguments or [])
    if rest and "=" not in rest[0]:
        return Path(rest.pop(0)), rest
    default = Path("run.yaml")
    return (default if default.exists() else None), rest

"""The text a command prints as its result, on standard output. Notes and warnings go to the `argosy` logger instead."""

from __future__ import annotations


def say(text: str) -> None:
    """Print `text` and flush, so that a pipe's reader sees it while the command still runs."""
    print(text, flush=True)

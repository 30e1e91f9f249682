"""Secrets never travel in a run spec: what looks like one is refused before anything is rendered.

Tokens reach a pod by reference to a Kubernetes Secret (`cluster.secrets`); a Slurm job takes them from the environment it
was submitted in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from argosy.config.cluster import ClusterSpec
from argosy.errors import ArgosyError

_LOOKS_SECRET = re.compile(
    r"hf_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,}"
    r"|AccountKey=[A-Za-z0-9+/]{20,}|[?&]sig=[A-Za-z0-9%]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s:@]+@"
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL|ACCOUNT_KEY|SAS", re.IGNORECASE)
_HARMLESS = {"TOKENIZERS_PARALLELISM"}


def refuse_secrets(text: str, overrides: Iterable[str], cluster: ClusterSpec) -> None:
    """Nothing that is rendered, stored in the run directory or shown in a process list may hold a secret."""
    for number, line in enumerate(text.splitlines(), start=1):
        if _LOOKS_SECRET.search(line):
            raise _refusal(f"line {number} of the run spec holds what looks like a secret", None)
    for override in overrides:
        if _LOOKS_SECRET.search(override):
            raise _refusal("it holds what looks like a secret", override.partition("=")[0])
    for name in cluster.env:
        if _SECRET_NAME.search(name) and name not in _HARMLESS:
            raise _refusal(
                f"{name} is the name of a secret, and would stand in every rendered file", f"cluster.env.{name}"
            )


def _refusal(cause: str, key: str | None) -> ArgosyError:
    return ArgosyError(
        "launch.secret",
        cause,
        key=key,
        fix="kubectl create secret generic NAME --from-literal=token=…, then cluster.secrets: {VARIABLE: NAME/token}; "
        "for a run on this machine or under Slurm set the variable in your shell",
    )

"""Names that Kubernetes accepts: a run's name as a DNS label, at most 63 characters with the suffixes that operators append."""

from __future__ import annotations

import re

from argosy.errors import ArgosyError

LIMIT = 63


def object_name(run: str) -> str:
    """Return a run's name as a DNS label: `GPT3.7b_v2` -> `gpt3-7b-v2`. If two runs collide, the label `argosy/run` tells them apart."""
    name = re.sub(r"[^a-z0-9-]", "-", run.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}"


def require_room(name: str, suffix: str) -> None:
    """Refuse a name that is too long with the suffix that an operator appends."""
    whole = f"{name}{suffix}"
    if len(whole) > LIMIT:
        raise ArgosyError(
            "launch.name-too-long",
            f"{whole!r} is {len(whole)} characters long, and Kubernetes allows {LIMIT}",
            key="name",
            value=name,
            fix=f"a name of at most {LIMIT - len(suffix)} characters",
        )

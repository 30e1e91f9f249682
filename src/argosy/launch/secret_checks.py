"""Refusal of secrets in a run spec, before anything is rendered.

A pod gets tokens by reference to a Kubernetes Secret (`cluster.secrets`). A Slurm job gets them from the environment it was
submitted in.
"""

from __future__ import annotations

from collections.abc import Iterable

from argosy.config.schema import RunSpec
from argosy.config.secrets import WEBHOOK
from argosy.data.remote.known_sets import known_set
from argosy.echo import looks_secret, names_secret
from argosy.errors import ArgosyError


def refuse_secrets(text: str, overrides: Iterable[str], spec: RunSpec, *, stays_here: bool) -> None:
    """Refuse a run spec that contains a secret, which would appear in rendered files, the run directory and process lists.

    `stays_here` allows a webhook's address: the run starts on this machine, and no file with the address leaves it.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if looks_secret(line):
            raise _refusal(f"line {number} of the run spec holds what looks like a secret", None)
    for override in overrides:
        if looks_secret(override):
            raise _refusal("it holds what looks like a secret", override.partition("=")[0])
    cluster, webhook = spec.cluster, spec.log.alerts.webhook
    for name in {} if cluster is None else cluster.env:
        if names_secret(name):
            raise _refusal(
                f"{name} is the name of a secret, and would stand in every rendered file", f"cluster.env.{name}"
            )
    if webhook is not None and not webhook.startswith("env:") and not stays_here:
        raise _refusal(
            "whoever has the address can post to it, and it would stand in every rendered file: write env:NAME", WEBHOOK
        )


def require_tokens(spec: RunSpec) -> None:
    """Refuse a run whose pods fetch a gated data set without a token.

    The fetch stage would refuse as well, but only after the volume was made and the pods were scheduled.
    """
    cluster = spec.cluster
    for number, source in enumerate(spec.data.train):
        known = known_set(source.prepare.fetch) if source.prepare is not None and source.prepare.fetch else None
        if known is not None and known.gated and cluster is not None and "HF_TOKEN" not in cluster.secrets:
            raise ArgosyError(
                "data.fetch-refused",
                f"{known.repo} is gated: its owner wants terms accepted first, and no HF_TOKEN reaches the fetch stage",
                key=f"data.train.{number}.prepare.fetch",
                value=source.prepare.fetch if source.prepare is not None else None,
                fix=f"accept the terms at https://huggingface.co/datasets/{known.repo}, kubectl create secret generic hf-token "
                f"-n {cluster.namespace} --from-literal=token=…, then cluster.secrets={{HF_TOKEN: hf-token/token}}",
            )


def _refusal(cause: str, key: str | None) -> ArgosyError:
    return ArgosyError(
        "launch.secret",
        cause,
        key=key,
        fix="kubectl create secret generic NAME --from-literal=token=…, then cluster.secrets: {VARIABLE: NAME/token}; "
        "for a run on this machine or under Slurm set the variable in your shell",
    )

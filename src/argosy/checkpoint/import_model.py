"""`argosy ckpt import`: choose the importer by the source, Hugging Face or Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from argosy.checkpoint.hf.hf_import import Imported, import_hf
from argosy.checkpoint.megatron.import_megatron import MegatronImported, import_megatron
from argosy.config.start import MEGATRON
from argosy.errors import ArgosyError


def import_model(
    source: str,
    to: Path,
    *,
    model: str | None,
    changes: Sequence[str],
    tokenizer: str | None,
    masters: bool,
    dry_run: bool,
) -> Imported | MegatronImported:
    if source.startswith(MEGATRON):
        return import_megatron(
            source, to, model=model, changes=changes, tokenizer=tokenizer, masters=masters, dry_run=dry_run
        )
    given = {"--model": model, "KEY=VALUE": " ".join(changes) or None, "--tokenizer": tokenizer}
    given["--no-masters"] = None if masters else "given"
    for key, value in given.items():
        if value is not None:
            raise ArgosyError(
                "config.conflict",
                f"{key} describes a checkpoint that does not say all of it, as Megatron's; this source describes itself",
                key=key,
                value=value,
                fix=f"leave it out, or write {MEGATRON}DIR",
            )
    return import_hf(source, to, dry_run=dry_run)

"""`argosy ckpt import`: convert a Hugging Face directory to our format (see `model_directory`).

The import holds one parameter in memory at a time. It writes under a hidden name and renames at the end, so the directory is either
complete or absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from argosy.checkpoint.assets import check_assets, copy_assets, listed_assets, tokenizer_files
from argosy.checkpoint.hf.hf_files import check_hashes, open_hf
from argosy.checkpoint.model_directory import counted, write_model
from argosy.checkpoint.source import hf_source
from argosy.checkpoint.staging import require_space, staged
from argosy.config.counts import count_parameters
from argosy.config.start import HF, MEGATRON, directory_of
from argosy.console.formats import volume
from argosy.console.progress_bar import ProgressBar
from argosy.data.text.tokenizer import load_tokenizer
from argosy.errors import ArgosyError
from argosy.families.experts import BALANCE_RULE
from argosy.families.hf_config import model_type_of


@dataclass(frozen=True)
class Imported:
    source: str
    to: str
    model_type: str
    parameters: int
    bytes: int
    files_hashed: int
    files: int
    unused: list[str]
    # In Hugging Face's names.
    copied: dict[str, str]
    assets: list[str]
    tokenizer: bool
    # Our weight of the load-balancing loss, for a model with experts.
    balance_loss: float | None = None
    warnings: list[str] = field(default_factory=list)

    def describe(self, *, done: bool) -> str:
        lines = [
            f"{'imported' if done else 'would import'} {self.source} to {self.to}",
            f"  {self.model_type}: {self.parameters:,} parameters, {volume(self.bytes)} of weights",
            f"  tokenizer and settings: {', '.join(self.assets) or 'none'}",
        ]
        if not self.tokenizer:
            lines.append("  it has no tokenizer: text cannot be sampled, and data cannot be held against it")
        if self.balance_loss is not None:
            lines.append(f"  balance loss: {BALANCE_RULE} = {self.balance_loss:g} (model.moe.balance_loss)")
        if self.unused:
            lines.append(
                f"  left out, as the model does not use them: {', '.join(self.unused[:4])}" + _more(self.unused)
            )
        lines += [f"  {name} is not in the files: it begins as {twin}" for name, twin in self.copied.items()]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        if done:
            hashed = f"{self.files_hashed} of {self.files} files match the SHA-256 they were published with"
            lines.append(f"  {hashed if self.files_hashed else 'no published SHA-256 to compare the files with'}")
            lines.append(f"start a run from it with init_from: {self.to}")
        return "\n".join(lines)


def import_hf(source: str, to: Path, *, dry_run: bool = False) -> Imported:
    if not source.startswith(HF):
        raise ArgosyError(
            "config.bad-value",
            f"{source!r} does not say what it is",
            key="SOURCE",
            value=source,
            fix=f"write {HF}{source} for a Hugging Face directory, {MEGATRON}{source} for a checkpoint of Megatron-LM",
        )
    directory = directory_of(source)
    model = open_hf(directory)
    check_assets(directory)
    infos = model.infos
    size = sum(info.nbytes for info in infos.values())
    facts = Imported(
        source,
        str(to),
        model_type_of(model.spec),
        count_parameters(model.spec).total,
        size,
        0,
        len(model.files),
        model.unused,
        model.copied,
        [path.name for path in listed_assets(directory)],
        any(tokenizer_files(directory)),
        None if model.spec.moe is None else model.spec.moe.balance_loss,
        _ids_beyond(directory, model.spec.vocab_size),
    )
    require_space(to, size)
    if dry_run:
        return facts
    with staged(to) as stage:
        hashed = check_hashes(model)
        with ProgressBar("import", size, "B") as bar:
            write_model(stage, hf_source(source, model), source, infos, counted(model.read, bar))
        copy_assets(directory, stage)
    return Imported(**{**facts.__dict__, "files_hashed": hashed})


def _ids_beyond(directory: Path, vocab_size: int) -> list[str]:
    """Return a warning if the tokenizer has ids that the model has no embedding for, as some published ones do."""
    path = next(iter(tokenizer_files(directory)), None)
    try:
        tokenizer = None if path is None else load_tokenizer(str(path), within=directory)
    except ArgosyError as error:
        # Without the sentencepiece package, the ids of a SentencePiece model are not known.
        if error.code != "data.missing-extra":
            raise
        return []
    if tokenizer is None or tokenizer.vocab_size <= vocab_size:
        return []
    last = tokenizer.vocab_size - 1
    return [
        f"the tokenizer has ids up to {last:,} ({tokenizer.decode([last])!r}), and the model's vocabulary ends at "
        f"{vocab_size - 1:,}: text with a token above that is refused"
    ]


def _more(names: list[str]) -> str:
    return f" and {len(names) - 4} more" if names[4:] else ""

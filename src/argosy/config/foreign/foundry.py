"""`argosy config from-foundry`: an LLM-Foundry train.yaml as a run spec. Every leaf is translated, needless here, or listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.foreign.draft import Draft
from argosy.config.reader import read_yaml
from argosy.errors import ArgosyError

_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_PLAIN = {
    "model.d_model": "model.hidden",
    "model.n_layers": "model.layers",
    "model.n_heads": "model.heads",
    "model.vocab_size": "model.vocab_size",
    "model.max_seq_len": "model.max_seq_len",
    "model.attn_config.kv_n_heads": "model.kv_heads",
    "model.resid_pdrop": "model.dropout",
    "model.init_config.init_std": "model.init_std",
    "train_loader.dataset.max_seq_len": "data.seq_len",
    "optimizer.lr": "optim.lr",
    "optimizer.eps": "optim.eps",
    "optimizer.betas": "optim.betas",
    "optimizer.weight_decay": "optim.weight_decay",
    "algorithms.gradient_clipping.clipping_threshold": "optim.clip",
    "scheduler.t_warmup": "optim.warmup",
    "eval_interval": "eval.every",
    "global_train_batch_size": "train.global_batch",
    "seed": "train.seed",
    "device_train_microbatch_size": "parallel.micro_batch",
    "save_interval": "checkpoint.every",
    "save_num_checkpoints_to_keep": "checkpoint.keep",
    "console_log_interval": "log.every",
    "run_name": "name",
}
# What Argosy does anyway, or otherwise; a whole section by its name.
_NEEDLESS = (
    "variables", "model.name", "model.init_device", "model.init_config", "model.attn_config.attn_impl", "model.loss_fn",
    "tokenizer.kwargs", "train_loader.name", "train_loader.num_workers", "train_loader.drop_last", "train_loader.dataset.shuffle",
    "train_loader.dataset.shuffle_seed", "eval_loader", "eval_first", "eval_subset_num_batches", "callbacks", "progress_bar",
    "log_to_console", "fsdp_config", "data_local", "data_remote", "tokenizer_name", "max_seq_len", "global_seed",
    "device_eval_batch_size", "dist_timeout", "autoresume", "save_folder", "load_path", "max_duration", "precision", "scheduler.name",
    "scheduler.alpha_f", "optimizer.name", "train_loader.dataset.remote", "train_loader.dataset.local", "train_loader.dataset.split",
    "tokenizer.name", "model.expansion_ratio", "model.attn_config.alibi", "model.attn_config.rope", "model.attn_config.rope_theta",
    "algorithms.gradient_clipping.clipping_type", "model.no_bias", "model.learned_pos_emb",
)  # fmt: skip


def from_foundry(path: Path) -> Draft:
    tree = read_yaml(path)[0]
    if not isinstance(tree, dict) or "model" not in tree:
        raise ArgosyError(
            "config.bad-yaml",
            f"{path} has no `model` section",
            fix="give the train.yaml of LLM-Foundry's scripts/train",
        )
    flat = {key: _resolved(value, tree) for key, value in _leaves(tree)}
    draft = Draft({"name": "from-foundry"})
    for key, value in flat.items():
        if key in _PLAIN:
            if value is not None:
                draft.set(_PLAIN[key], value)
        elif not key.startswith(_NEEDLESS):
            draft.left.append(f"{key}: {value}")
    _model(draft, flat)
    _data(draft, flat)
    _training(draft, flat)
    return draft


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _resolved(value: Any, tree: dict[str, Any]) -> Any:
    """`${variables.max_seq_len}` filled in; what the environment would say stays as it is."""
    for _ in range(8):  # a variable may name another
        names = _VARIABLE.findall(value) if isinstance(value, str) else []
        found = {name: _at(tree, name) for name in names}
        for name, known in found.items():
            if known is not None and isinstance(value, str):
                value = known if value == f"${{{name}}}" else value.replace(f"${{{name}}}", str(known))
        if all(known is None for known in found.values()):
            break
    return value


def _at(tree: dict[str, Any], name: str) -> Any:
    node: Any = tree
    for part in name.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return None if isinstance(node, dict) else node


def _model(draft: Draft, flat: dict[str, Any]) -> None:
    alibi = bool(flat.get("model.attn_config.alibi", False))
    rope = bool(flat.get("model.attn_config.rope", False))
    draft.set("model.family", "mpt")
    draft.set("model.positions", "rope" if rope else "alibi" if alibi else "learned")
    if rope and flat.get("model.attn_config.rope_theta") is not None:
        draft.set("model.rope_theta", flat["model.attn_config.rope_theta"])
    bias = not flat.get("model.no_bias", False)
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        draft.set(f"model.{key}", bias)
    ratio = flat.get("model.expansion_ratio", 4)
    draft.set("model.ffn", int(ratio * draft.get("model.hidden", 0)))


def _data(draft: Draft, flat: dict[str, Any]) -> None:
    remote, local = flat.get("train_loader.dataset.remote"), flat.get("train_loader.dataset.local")
    source = remote or local or "corpus"
    split = flat.get("train_loader.dataset.split")
    draft.set("data.train", [{"path": str(source)}])
    draft.notes.append(
        f"data.train is {source}" + (f" (split {split})" if split else "") + ": MDS is not read while training; "
        "`argosy data convert MDS --output DIR` makes a corpus of it once"
    )
    if remote and local and "://" in str(remote):
        draft.set("data.train", [{"path": str(remote), "cache": str(local)}])
    if flat.get("tokenizer.name"):
        draft.notes.append(
            f"the tokenizer is {flat['tokenizer.name']}: data.tokenizer is the path of its tokenizer.json"
        )


def _training(draft: Draft, flat: dict[str, Any]) -> None:
    _length(draft, str(flat.get("max_duration", "")))
    precision = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"}
    if flat.get("precision") in precision:
        draft.set("train.precision", precision[flat["precision"]])
    name = str(flat.get("optimizer.name", "decoupled_adamw"))
    if name not in ("decoupled_adamw", "adamw"):
        draft.left.append(f"optimizer.name: {name}")
    if name == "decoupled_adamw" and (decay := draft.get("optim.weight_decay")):
        lr = draft.get("optim.lr", 1.0)
        draft.set("optim.weight_decay", decay / lr)
        draft.notes.append(
            f"decoupled weight decay {decay:g} is {decay / lr:g} here, where it is multiplied by the learning rate"
        )
    schedules = {"cosine_with_warmup": "cosine", "linear_decay_with_warmup": "linear", "constant_with_warmup": "constant",
                 "inv_sqrt_with_warmup": "inverse_sqrt"}  # fmt: skip
    schedule = str(flat.get("scheduler.name", "cosine_with_warmup"))
    draft.set("optim.schedule", schedules.get(schedule, "cosine"))
    if schedule not in schedules:
        draft.left.append(f"scheduler.name: {schedule}")
    if flat.get("scheduler.alpha_f") is not None and draft.get("optim.lr"):
        draft.set("optim.min_lr", flat["scheduler.alpha_f"] * draft.get("optim.lr"))
    if draft.get("parallel.micro_batch") == "auto":
        draft.set("parallel.micro_batch", "auto")
    batches = flat.get("eval_subset_num_batches")
    if isinstance(batches, int) and batches > 0:
        draft.set("eval.batches", batches)
    if flat.get("save_folder"):
        runs, _, run = str(flat["save_folder"]).rstrip("/").rpartition("/")
        draft.set("runs_dir", runs or ".")
        draft.notes.append(
            f"save_folder {flat['save_folder']}: a run has one directory, runs_dir/name ({run} here is its name's)"
        )
    if any(key.startswith("fsdp_config") for key in flat):
        draft.notes.append(
            "fsdp_config: parallel.dp_shard says over how many ranks the state is sharded; `argosy plan` picks it"
        )


def _length(draft: Draft, duration: str) -> None:
    match = re.fullmatch(r"(\d[\d_]*)(ba|ep|tok|sp)", duration.strip())
    if match is None:
        draft.notes.append("no max_duration: set train.steps, tokens, samples or epochs")
        return
    unit = {"ba": "steps", "ep": "epochs", "tok": "tokens", "sp": "samples"}[match[2]]
    draft.set(f"train.{unit}", int(match[1].replace("_", "")))

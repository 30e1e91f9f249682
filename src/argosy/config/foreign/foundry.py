"""The converter behind `argosy config from-foundry`: an LLM-Foundry train.yaml to a run spec.

Every leaf is translated, noted as not needed, or listed as having no counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.foreign.draft import Draft
from argosy.config.foreign.foundry_icl import take_over_icl
from argosy.config.foreign.validation import take_over_validation
from argosy.config.lr_schedules import LR_SCHEDULES, schedule_elsewhere
from argosy.config.optimizers import DEFAULT, rule_elsewhere
from argosy.config.yaml_reader import read_yaml
from argosy.errors import ArgosyError

Leaves = dict[str, Any]
# Marks a variable that the file does not define.
_ELSEWHERE = object()
_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_PLAIN = {
    "model.d_model": "model.hidden",
    "model.n_layers": "model.layers",
    "model.n_heads": "model.heads",
    "model.vocab_size": "model.vocab_size",
    "model.max_seq_len": "model.max_seq_len",
    "model.tie_word_embeddings": "model.tied",
    "model.attn_config.kv_n_heads": "model.kv_heads",
    "model.resid_pdrop": "model.dropout",
    "model.init_config.init_std": "model.init_std",
    "train_loader.dataset.max_seq_len": "data.seq_len",
    "optimizer.lr": "optim.lr",
    "optimizer.weight_decay": "optim.weight_decay",
    "algorithms.gradient_clipping.clipping_threshold": "optim.clip",
    "eval_interval": "eval.every",
    "global_train_batch_size": "train.global_batch",
    "seed": "train.seed",
    "save_interval": "checkpoint.every",
    "save_num_checkpoints_to_keep": "checkpoint.keep",
    "console_log_interval": "log.every",
    "run_name": "name",
}
# Leaves that the functions below read, some of them together, and variables that other leaves refer to.
_HANDLED = (
    "model.name", "model.no_bias", "model.learned_pos_emb", "model.expansion_ratio", "model.norm_type",
    "model.pretrained_model_name_or_path", "model.pretrained", "model.attn_config.alibi", "model.attn_config.alibi_bias_max", "model.attn_config.rope",
    "model.attn_config.rope_theta", "model.attn_config.attn_type", "model.attn_config.sliding_window_size", "tokenizer.name",
    "train_loader.dataset.remote", "train_loader.dataset.local", "train_loader.dataset.split", "optimizer.name", "optimizer.betas", "optimizer.eps",
    "scheduler.name", "scheduler.alpha_f", "scheduler.t_warmup", "scheduler.t_max", "max_duration", "precision", "eval_subset_num_batches",
    "device_train_microbatch_size", "save_folder", "fsdp_config", "callbacks", "eval_loader", "loggers.tensorboard", "loggers.wandb.project",
    "loggers.wandb.entity", "icl_tasks",
    "variables", "data_local", "data_remote", "tokenizer_name", "max_seq_len", "global_seed",
)  # fmt: skip
# Leaves (or whole sections) that need no key, because Argosy always does it or does it differently, with the reason.
_NEEDLESS = {
    "model.init_device": "weights are initialised on the device that keeps them",
    "model.attn_config.attn_impl": "kernels are chosen for the device",
    "model.loss_fn": "kernels are chosen for the device",
    "tokenizer.kwargs": "the tokenizer's files define it",
    "train_loader.name": "there is one corpus format",
    "train_loader.num_workers": "a thread prefetches batches",
    "train_loader.drop_last": "every step has a full batch",
    "train_loader.dataset.shuffle": "samples are always shuffled",
    "train_loader.dataset.shuffle_seed": "train.seed is the shuffle seed",
    "algorithms.gradient_clipping.clipping_type": "clipping is by norm",
    "eval_first": "training starts without an evaluation",
    "device_eval_batch_size": "an evaluation has eval.batches global batches",
    "progress_bar": "a bar on a terminal, lines elsewhere",
    "log_to_console": "always, unless --quiet",
    "dist_timeout": "the supervisor stops ranks that hang (fault.stall_after)",
    "autoresume": "a run always resumes from its newest checkpoint",
}
_WATCHED = (
    "speed_monitor",
    "lr_monitor",
    "memory_monitor",
    "runtime_estimator",
    "optimizer_monitor",
    "system_metrics_monitor",
)


def from_foundry(path: Path) -> Draft:
    tree = read_yaml(path)[0]
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or "name" not in model:
        raise ArgosyError(
            "config.bad-yaml",
            f"{path} has no `model` section with a `name`, as mpt_causal_lm",
            fix="give the train.yaml of LLM-Foundry's scripts/train",
        )
    flat = {key: _resolved(value, tree) for key, value in _leaves(tree)}
    draft = Draft({"name": "from-foundry"})
    for key, value in flat.items():
        if key in _PLAIN:
            if value is not None:
                draft.set(_PLAIN[key], value)
        elif (why := next((_NEEDLESS[name] for name in _NEEDLESS if _within(key, name)), None)) is not None:
            draft.notes.append(f"{key}: {why}")
        elif not any(_within(key, name) for name in _HANDLED):
            draft.left.append(f"{key}: {value}")
    _model(draft, flat)
    _data(draft, flat)
    _training(draft, flat)
    _evaluation(draft, flat)
    take_over_icl(draft, flat.get("icl_tasks"))
    _surroundings(draft, flat)
    return draft


def _within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _resolved(value: Any, tree: dict[str, Any]) -> Any:
    """Substitute references such as `${variables.max_seq_len}`.

    A variable without a value (to be given on the command line) makes the whole value None. A reference to something outside the
    file, such as the environment, stays as it is.
    """
    # A variable may refer to another one, up to 8 deep.
    for _ in range(8):
        names = _VARIABLE.findall(value) if isinstance(value, str) else []
        found = {name: _at(tree, name) for name in names}
        if any(known is None for known in found.values()):
            return None
        found = {name: known for name, known in found.items() if known is not _ELSEWHERE}
        for name, known in found.items():
            value = known if value == f"${{{name}}}" else str(value).replace(f"${{{name}}}", str(known))
        if not found:
            break
    return value


def _at(tree: dict[str, Any], name: str) -> Any:
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ELSEWHERE
        node = node[part]
    return _ELSEWHERE if isinstance(node, dict) else node


def _model(draft: Draft, flat: Leaves) -> None:
    kind = flat.get("model.name", "mpt_causal_lm")
    if kind == "hf_causal_lm":
        source = flat.get("model.pretrained_model_name_or_path", "MODEL")
        draft.tree.pop("model", None)
        draft.set("init_from", f"hf:{source}")
        draft.notes.append(f"init_from is hf:{source}: the directory of that model's files")
        if flat.get("model.pretrained") is False:
            draft.left.append(
                "model.pretrained: False: init_from starts from its weights; give the model's keys for fresh weights"
            )
        return
    if kind != "mpt_causal_lm":
        draft.left.append(f"model.name: {kind}: replaced by MPT")
    _positions(draft, flat)
    # Without ALiBi this is GPT-2's structure with exact GELU, and exported as such.
    draft.set("model.family", "gpt" if draft.get("model.positions") == "learned" else "mpt")
    draft.set("model.activation", "gelu")
    bias = not flat.get("model.no_bias", False)
    rms = "rmsnorm" in str(flat.get("model.norm_type", "low_precision_layernorm"))
    draft.set("model.norm", "rmsnorm" if rms else "layernorm")
    draft.set("model.norm_bias", bias and not rms)
    draft.set("model.attention_bias", bias)
    draft.set("model.mlp_bias", bias)
    if not any(_within(key, "model.init_config") for key in flat):
        draft.notes.append(
            "model.init_std: weights are drawn from a normal distribution with one standard deviation; Foundry's default, "
            "kaiming_normal_, has sqrt(2 / fan-in) for each matrix"
        )
    draft.set("model.ffn", int(flat.get("model.expansion_ratio", 4) * draft.get("model.hidden", 0)))
    if flat.get("model.attn_config.attn_type") == "multiquery_attention":
        draft.set("model.kv_heads", 1)
    if flat.get("model.attn_config.alibi_bias_max", 8) != 8:
        draft.left.append(
            f"model.attn_config.alibi_bias_max: {flat['model.attn_config.alibi_bias_max']}: always 8 here"
        )
    window = flat.get("model.attn_config.sliding_window_size", -1)
    if window > 0:
        draft.set("model.window", window)


def _positions(draft: Draft, flat: Leaves) -> None:
    rope, alibi = flat.get("model.attn_config.rope", False), flat.get("model.attn_config.alibi", False)
    draft.set("model.positions", "rope" if rope else "alibi" if alibi else "learned")
    if rope:
        draft.set("model.rope_theta", flat.get("model.attn_config.rope_theta", 10000))
    learned = flat.get("model.learned_pos_emb", True)
    if not (rope or alibi or learned):
        draft.left.append("model.learned_pos_emb: False: no position embedding; replaced by learned positions")


def _data(draft: Draft, flat: Leaves) -> None:
    corpus = _corpus(draft, _dataset(flat, "train_loader"), "train_loader")
    draft.set("data.train", [corpus])
    draft.notes.append(
        f"data.train is {corpus['path']}: MDS is not read while training; "
        "`argosy data convert MDS --output DIR` converts it to a corpus once"
    )
    if flat.get("tokenizer.name"):
        draft.notes.append(
            f"the tokenizer is {flat['tokenizer.name']}: data.tokenizer=hf:{flat['tokenizer.name']} fetches it; or give the path of its tokenizer.json"
        )


def _dataset(flat: Leaves, loader: str) -> Leaves:
    prefix = f"{loader}.dataset."
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def _corpus(draft: Draft, dataset: Leaves, loader: str) -> dict[str, str]:
    """Return a loader's data set as an entry of `data.train`.

    `local` caches `remote`, which may be a mounted directory. Without `remote` it is the data set itself. A split is a directory of
    either, as in MDS.
    """
    part = f"/{dataset['split']}" if dataset.get("split") else ""
    roots = [str(dataset.get(key) or "").rstrip("/") for key in ("remote", "local")]
    remote, local = (f"{root}{part}" if root else None for root in roots)
    path = str(remote or local or "corpus")
    if remote is None or local is None or remote == local:
        return {"path": path}
    if "://" not in path and not path.startswith("/"):
        draft.left.append(
            f"{loader}.dataset.local: {roots[1]}: a cache needs the absolute path of {path}, as file:///PATH"
        )
        return {"path": path}
    return {"path": path if "://" in path else f"file://{path}", "cache": local}


def _training(draft: Draft, flat: Leaves) -> None:
    _length(draft, str(flat.get("max_duration", "")))
    precision = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"}
    asked = flat.get("precision", "amp_bf16")
    draft.set("train.precision", precision.get(asked, "bf16"))
    if asked not in precision:
        draft.left.append(f"precision: {asked}: replaced by bf16")
    _optimiser(draft, flat)
    if "algorithms.gradient_clipping.clipping_threshold" not in flat:
        draft.set("optim.clip", None)
    _schedule(draft, flat)
    micro = flat.get("device_train_microbatch_size", "auto")
    if isinstance(micro, int):
        draft.set("parallel.micro_batch", micro)
    else:
        draft.notes.append(
            f"device_train_microbatch_size: {micro}: the planner chooses it, with the rest of `parallel`"
        )


def _optimiser(draft: Draft, flat: Leaves) -> None:
    name = flat.get("optimizer.name")
    rule = DEFAULT if name is None else rule_elsewhere("foundry", str(name))
    if rule is None:
        draft.left.append(f"optimizer.name: {name}: replaced by {DEFAULT.title}")
        rule = DEFAULT
    if rule is not DEFAULT:
        draft.set("optim.name", rule.name)
    for key in ("betas", "eps"):
        value = flat.get(f"optimizer.{key}")
        if value is not None and key in rule.keys.model_fields:
            draft.set(rule.key_path(key), value)
        elif value is not None:
            draft.left.append(f"optimizer.{key}: {value}: {rule.title} does not read it")
    if draft.get("optim.weight_decay") is None:
        draft.set("optim.weight_decay", 0.0)  # Foundry's optimisers decay nothing unless told to
    decoupled = name is None or str(name).startswith("decoupled_")
    if decoupled and (decay := draft.get("optim.weight_decay")):
        lr = draft.get("optim.lr", 1.0)
        draft.set("optim.weight_decay", decay / lr)
        draft.notes.append(
            f"decoupled weight decay {decay:g} is {decay / lr:g} here, where it is multiplied by the learning rate"
        )


def _schedule(draft: Draft, flat: Leaves) -> None:
    """Translate the learning-rate schedule.

    Composer's learning rate starts at 0, reaches the peak after the warmup, and reaches its final value after `t_max` (default: the
    length of the run). The last step of a run is therefore one step before the final value.
    """
    schedule = str(flat.get("scheduler.name", "cosine_with_warmup"))
    known = schedule_elsewhere("foundry", schedule)
    draft.set("optim.schedule", known or "cosine")
    if known is None:
        draft.left.append(f"scheduler.name: {schedule}: replaced by cosine")
    if draft.get("optim.lr"):
        draft.set("optim.min_lr", flat.get("scheduler.alpha_f", 0.0) * draft.get("optim.lr"))
    if (warmup := _time(draft, flat, "scheduler.t_warmup", "0ba")) is not None and not re.match(r"0[a-z]", warmup):
        draft.set("optim.warmup", warmup)
        draft.set("optim.warmup_init", 0.0)
    if LR_SCHEDULES[known or "cosine"].shape is None:
        if "scheduler.t_max" in flat:
            draft.left.append(f"scheduler.t_max: {flat['scheduler.t_max']}: {schedule} has no end here")
    elif (end := _time(draft, flat, "scheduler.t_max", "1dur")) is not None:
        draft.set("optim.decay_end", end)


def _length(draft: Draft, duration: str) -> None:
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)(ba|ep|tok|sp)?", duration.strip())
    if match is None:
        draft.notes.append(f"max_duration {duration or 'is not given'}: set train.steps, tokens, samples or epochs")
        return
    # A number without a unit is epochs.
    unit = {"ba": "steps", "ep": "epochs", "tok": "tokens", "sp": "samples"}[match[2] or "ep"]
    draft.set(f"train.{unit}", int(float(match[1].replace("_", ""))))


def _time(draft: Draft, flat: Leaves, key: str, default: str) -> str | None:
    """Return a duration in Argosy's notation.

    `0.02dur` is a share of the run, rounded down in the unit of the run's length as Composer does.
    """
    text = str(flat.get(key, default))
    share = re.fullmatch(r"([\d.]+)dur", text)
    if share is None:
        return text
    for unit, suffix in {"steps": "ba", "tokens": "tok", "samples": "sp"}.items():
        if (length := draft.get(f"train.{unit}")) is not None:
            return f"{int(float(share[1]) * length)}{suffix}"
    if (length := draft.get("train.epochs")) is not None:
        return f"{float(share[1]) * length:.17g}ep"
    if key in flat:
        draft.left.append(f"{key}: {text}: the length of the run is not known")
    return None


def _evaluation(draft: Draft, flat: Leaves) -> None:
    """Translate evaluation. Foundry evaluates on a separate data set, and not at all without one."""
    own = {key: value for key, value in flat.items() if _within(key, "eval_loader")}
    if not own or draft.get("eval.every") in (0, "0ba"):
        draft.set("eval", "off")
        draft.notes += ["eval_loader: eval_interval is 0, so nothing is evaluated"] if own else []
        return
    # A list of loaders, one for each data set, or one loader.
    several = [loader.get("dataset", {}) for loader in own.get("eval_loader") or []]
    corpora = [_corpus(draft, dataset, "eval_loader") for dataset in several or [_dataset(flat, "eval_loader")]]
    take_over_validation(draft, "eval_loader", corpora)
    batches = flat.get("eval_subset_num_batches", -1)
    if isinstance(batches, int) and batches > 0:
        draft.set("eval.batches", batches)
        draft.notes.append(
            "eval.batches counts batches of train.global_batch; Foundry's evaluation has its own batch size"
        )
    else:
        draft.notes.append(
            f"eval_subset_num_batches: {batches}: Foundry evaluates on all of the data set, Argosy on eval.batches"
        )


def _surroundings(draft: Draft, flat: Leaves) -> None:
    """Translate the save folder, FSDP, loggers and callbacks."""
    if flat.get("save_folder"):
        runs, _, run = str(flat["save_folder"]).rstrip("/").rpartition("/")
        draft.set("runs_dir", runs or ".")
        draft.notes.append(
            f"save_folder {flat['save_folder']}: a run has one directory, runs_dir/name ({run} here is its name's)"
        )
    if any(_within(key, "fsdp_config") for key in flat):
        if flat.get("fsdp_config.activation_checkpointing"):
            draft.set("parallel.recompute", "full")
        if flat.get("fsdp_config.activation_cpu_offload"):
            draft.left.append("fsdp_config.activation_cpu_offload: True")
        draft.notes.append(
            "fsdp_config: parallel.dp_shard is the number of ranks that shard the state; `argosy plan` picks it"
        )
    if any(_within(key, "loggers.tensorboard") for key in flat):
        draft.set("log.sinks.tensorboard", True)
    project, entity = (flat.get(f"loggers.wandb.{name}") for name in ("project", "entity"))
    if project:
        draft.set("log.sinks.wandb", f"{entity}/{project}" if entity else project)
    elif entity:
        draft.left.append(f"loggers.wandb.entity: {entity}: log.sinks.wandb is PROJECT or ENTITY/PROJECT; set it")
    for callback in dict.fromkeys(key.split(".")[1] for key in flat if key.startswith("callbacks.")):
        if callback in _WATCHED:
            draft.notes.append(f"callbacks.{callback}: always logged")
        else:
            draft.left.append(f"callbacks.{callback}")

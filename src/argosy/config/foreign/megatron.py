"""The converter behind `argosy config from-megatron`: arguments of Megatron-LM's pretrain_{gpt,bert,t5,ict}.py to a run spec.

Every argument is translated, noted as not needed, or listed as having no counterpart; none is silently dropped. If Megatron's
default differs from Argosy's, the run spec has Megatron's.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from argosy.config.foreign.draft import Draft
from argosy.config.foreign.megatron_model import MODEL_ARGUMENTS, describe_model, family_of
from argosy.config.foreign.megatron_schedule import SCHEDULE_ARGUMENTS, describe_schedule
from argosy.config.foreign.megatron_words import Values, count, first_word, number, read_value
from argosy.config.foreign.validation import take_over_validation
from argosy.config.optimizers import DEFAULT, rule_elsewhere
from argosy.errors import ArgosyError


def _steps(text: str) -> str:
    return f"{int(text)}ba"


# argument -> (key, function that parses its value)
_PLAIN: dict[str, tuple[str, Callable[[str], Any]]] = {
    "num-layers": ("model.layers", count),
    "hidden-size": ("model.hidden", count),
    "ffn-hidden-size": ("model.ffn", count),
    "num-attention-heads": ("model.heads", count),
    "num-query-groups": ("model.kv_heads", count),
    "kv-channels": ("model.head_dim", count),
    "max-position-embeddings": ("model.max_seq_len", count),
    "vocab-size": ("model.vocab_size", count),
    "padded-vocab-size": ("model.vocab_size", count),
    "make-vocab-size-divisible-by": ("model.vocab_multiple", count),
    "rotary-base": ("model.rope_theta", number),
    "norm-epsilon": ("model.norm_eps", number),
    "init-method-std": ("model.init_std", number),
    "encoder-num-layers": ("model.layers", count),
    "decoder-num-layers": ("model.decoder_layers", count),
    "num-experts": ("model.moe.experts", count),
    "moe-router-topk": ("model.moe.top_k", count),
    "moe-ffn-hidden-size": ("model.moe.ffn", count),
    "moe-aux-loss-coeff": ("model.moe.balance_loss", number),
    "moe-z-loss-coeff": ("model.moe.z_loss", number),
    "seq-length": ("data.seq_len", count),
    "encoder-seq-length": ("data.seq_len", count),
    "short-seq-prob": ("data.bert.short_seq_prob", number),
    "tokenizer-model": ("data.tokenizer", str),
    "data-cache-path": ("data.order_cache", str),
    "global-batch-size": ("train.global_batch", count),
    "seed": ("train.seed", int),
    "adam-eps": ("optim.eps", number),
    "clip-grad": ("optim.clip", lambda text: number(text) or None),
    "micro-batch-size": ("parallel.micro_batch", count),
    "tensor-model-parallel-size": ("parallel.tp", count),
    "pipeline-model-parallel-size": ("parallel.pp", count),
    "context-parallel-size": ("parallel.cp", count),
    "expert-model-parallel-size": ("parallel.ep", count),
    "save-interval": ("checkpoint.every", _steps),
    "log-interval": ("log.every", _steps),
    "ict-head-size": ("model.retrieval.projection", count),
    "query-in-block-prob": ("data.ict.query_in_block", number),
}
# Second names of a key: used only if the first is not given, wherever each stands in the command. Megatron refuses both names of layers
# and lengths.
_SECOND_NAMES = {
    "padded-vocab-size": "vocab-size",
    "encoder-num-layers": "num-layers",
    "encoder-seq-length": "seq-length",
}
_SWITCHES: dict[str, tuple[str, Any]] = {
    "qk-layernorm": ("model.qk_norm", True),
    "reset-position-ids": ("data.reset_positions", True),
    "reset-attention-mask": ("data.document_mask", True),
    "eod-mask-loss": ("data.mask_eod", True),
    "grad-reduce-in-bf16": ("parallel.reduce", "bf16"),
    "recompute-activations": ("parallel.recompute", "selective"),
    "untie-embeddings-and-output-weights": ("model.tied", False),
    "biencoder-shared-query-context-model": ("model.retrieval.shared", True),
}
# Arguments that need no key, with the reason. An empty reason: another function below reads the argument.
_NEEDLESS = {
    "use-distributed-optimizer": "optimiser state is sharded if parallel.dp_shard is above 1",
    "overlap-grad-reduce": "always on",
    "overlap-param-gather": "always on",
    "use-mcore-models": "there is one set of models",
    "transformer-impl": "there is one implementation",
    "attention-backend": "kernels are chosen for the device",
    "use-flash-attn": "kernels are chosen for the device",
    "distributed-backend": "NCCL on GPUs, gloo on CPUs",
    "distributed-timeout-minutes": "the supervisor stops ranks that hang (fault.stall_after)",
    "dataloader-type": "the order of samples is a function of the seed",
    "num-workers": "a thread prefetches batches",
    "ckpt-format": "there is one format, which any layout reads",
    "use-dist-ckpt": "there is one format, which any layout reads",
    "ckpt-fully-parallel-load": "always on",
    "ckpt-fully-parallel-save": "always on",
    "ckpt-assume-constant-structure": "nothing is cached between saves",
    "use-persistent-ckpt-worker": "Argosy has its own checkpoint writer (checkpoint.mode)",
    "async-save": "Argosy has its own checkpoint writer (checkpoint.mode)",
    "exit-signal-handler": "SIGTERM and Ctrl-C always save",
    "manual-gc": "ranks always collect garbage at the same step",
    "manual-gc-interval": "ranks always collect garbage at the same step",
    "calculate-per-token-loss": "always: a loss is a sum over tokens",
    "cross-entropy-loss-fusion": "kernels are chosen for the device",
    "log-throughput": "always logged",
    "no-position-embedding": "position-embedding-type sets it",
    "accumulate-allreduce-grads-in-fp32": "parallel.reduce is fp32 by default",
    "attention-softmax-in-fp32": "always",
    "group-query-attention": "num-query-groups sets it",
    "no-load-optim": "a run always resumes with its optimiser state",
    "no-load-rng": "there is no generator state to load",
    "no-masked-softmax-fusion": "kernels are chosen for the device",
    "no-gradient-accumulation-fusion": "kernels are chosen for the device",
    "bias-gelu-fusion": "kernels are chosen for the device",
    "tensorboard-dir": "event files are in the run directory's tensorboard/; `argosy dash` shows the curves too",
    "use-sharp": "cluster.sharp, if the InfiniBand switches support it",
    "mock-data": "`argosy bench` trains on synthetic data",
    "vocab-extra-ids": "the tokenizer has them",
    "moe-grouped-gemm": "kernels are chosen for the device",
    "moe-token-dispatcher-type": "tokens go to their experts' ranks by all-to-all",
    "tokenizer-type": "the tokenizer's files define its type",
    **dict.fromkeys((*MODEL_ARGUMENTS, *SCHEDULE_ARGUMENTS), ""), "bf16": "", "fp16": "", "fp8-format": "",
    "train-data-path": "", "valid-data-path": "", "test-data-path": "", "data-path": "", "split": "",
    "eval-interval": "", "eval-iters": "",
    "adam-beta1": "", "adam-beta2": "", "recompute-granularity": "", "save": "", "load": "", "optimizer": "",
    "vocab-file": "", "merge-file": "", "mask-prob": "", "sequence-parallel": "", "wandb-project": "", "wandb-entity": "",
    "num-layers-per-virtual-pipeline-stage": "", "num-virtual-stages-per-pipeline-rank": "",
}  # fmt: skip


def from_megatron(command: str) -> Draft:
    """Convert a command `torchrun … pretrain_gpt.py --num-layers 24 …`, or its arguments alone."""
    script, given = _arguments(command)
    family = family_of(script, given)
    draft = Draft({"name": "from-megatron"})
    for name, values in given.items():
        if _SECOND_NAMES.get(name) in given:
            draft.notes.append(f"--{name}: not used, because --{_SECOND_NAMES[name]} sets {_PLAIN[name][0]}")
        elif name in _PLAIN:
            key, read = _PLAIN[name]
            draft.set(key, read_value(name, values, read))
        elif name in _SWITCHES:
            draft.set(*_SWITCHES[name])
        elif name in _NEEDLESS:
            if _NEEDLESS[name]:
                draft.notes.append(f"--{name}: {_NEEDLESS[name]}")
        else:
            draft.left.append(f"--{name} {' '.join(values)}".strip())
    describe_model(draft, family, given)
    _data(draft, family, given)
    _training(draft, given)
    _sinks(draft, given)
    if "train" in draft.tree and "global_batch" not in draft.tree["train"] and "micro-batch-size" in given:
        draft.notes.append(
            "no --global-batch-size: Megatron's would be micro-batch x data-parallel ranks; set train.global_batch"
        )
    return draft


def _arguments(command: str) -> tuple[str, dict[str, Values]]:
    """Return the script and its arguments by name.

    Words before the script belong to the launcher and are dropped: `argosy launch` takes its place.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ArgosyError("config.bad-value", f"the command cannot be read: {error}", fix="close its quotes") from None
    scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
    script = words[scripts[-1]].rpartition("/")[2] if scripts else ""
    words = words[scripts[-1] + 1 :] if scripts else words
    found: dict[str, Values] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("_", "-").partition("=")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name] += word.split()
    if "num-layers" not in found and "hidden-size" not in found:
        raise ArgosyError(
            "config.bad-value",
            "there is no --num-layers or --hidden-size among the arguments",
            fix="give the arguments of pretrain_gpt.py (or _bert, _t5, _ict) in one pair of quotes",
        )
    return script, found


def _data(draft: Draft, family: str, given: dict[str, Values]) -> None:
    words = given.get("data-path") or given.get("train-data-path") or []
    if not words:
        draft.notes.append("no --data-path: set data.train")
        draft.set("data.train", "corpus")
    else:
        draft.set("data.train", _corpora(words))
    if given.get("data-path") and "train-data-path" in given:
        draft.left.append(f"--train-data-path {' '.join(given['train-data-path'])}: data.train is --data-path")
    if own := given.get("valid-data-path"):
        take_over_validation(draft, "--valid-data-path", _corpora(own))
    if "test-data-path" in given:
        draft.left.append(
            f"--test-data-path {' '.join(given['test-data-path'])}: `argosy eval` reads any corpus after the run"
        )
    shares = " ".join(["1"] if own else given.get("split") or ["969,30,1"]).replace(",", " ").split()
    draft.set("data.split", [read_value("split", [share], float) for share in shares] + [0.0] * (3 - len(shares)))
    if "vocab-file" in given and "merge-file" in given:
        draft.set("data.tokenizer", first_word(given, "vocab-file").rpartition("/")[0] or ".")
        draft.notes.append("data.tokenizer is the directory of --vocab-file, with merges.txt beside it")
    elif "vocab-file" in given:
        draft.left.append(f"--vocab-file {first_word(given, 'vocab-file')}: data.tokenizer is a tokenizer.json")
    if "mask-prob" in given:
        rate = {"bert": "data.bert.mask_rate", "t5": "data.t5.noise_density"}.get(family)
        if rate is None:
            draft.left.append(f"--mask-prob {first_word(given, 'mask-prob')}")
        else:
            draft.set(rate, read_value("mask-prob", given["mask-prob"], number))
    if family == "ict" and (length := draft.get("data.seq_len")) is not None:
        draft.set("data.ict.query_len", length)
        draft.notes.append(
            "data.ict.query_len is --seq-length, as in Megatron; a sentence rarely needs more than 64 tokens"
        )
    if family in ("gpt", "llama"):
        draft.set("data.order", "megatron")
        draft.notes.append(
            "data.order: megatron gives Megatron's order of samples; remove it for Argosy's, which needs no index"
        )


def _corpora(words: Values) -> list[dict[str, Any]]:
    """Parse `w1 p1 w2 p2 …`, or paths alone, which are then weighted by their size."""
    weights = [word for word in words[::2] if word.replace(".", "", 1).replace("e-", "", 1).isdigit()]
    if len(weights) * 2 == len(words):
        return [{"path": path, "weight": number(weight)} for weight, path in zip(weights, words[1::2], strict=True)]
    if weights:
        raise ArgosyError(
            "config.bad-value",
            f"--data-path has {len(words)} words without a weight before each path",
            key="--data-path",
            fix="w1 path1 w2 path2 …, or paths alone",
        )
    return [{"path": path} for path in words]


def _training(draft: Draft, given: dict[str, Values]) -> None:
    betas = (("adam-beta1", "0.9"), ("adam-beta2", "0.999"))
    draft.set("optim.betas", [read_value(name, given.get(name) or [default], number) for name, default in betas])
    optimizer = first_word(given, "optimizer", "adam")
    rule = rule_elsewhere("megatron", optimizer)
    draft.set("optim.name", (rule or DEFAULT).name)
    if rule is None:
        draft.left.append(f"--optimizer {optimizer}: replaced by {DEFAULT.title}")
    precision = [name for name in ("fp8-format", "bf16", "fp16") if name in given]
    draft.set("train.precision", precision[0].removesuffix("-format") if precision else "fp32")
    if draft.get("parallel.tp", 1) > 1:
        draft.set("parallel.sp", "sequence-parallel" in given)
    elif "sequence-parallel" in given:
        draft.notes.append("--sequence-parallel: ignored, as in Megatron without tensor parallelism")
    _pipeline(draft, given)
    describe_schedule(draft, given)
    if first_word(given, "recompute-granularity") in ("full", "selective"):
        draft.set("parallel.recompute", first_word(given, "recompute-granularity"))
    _evaluation(draft, given)
    where = first_word(given, "save") or first_word(given, "load")
    if where:
        runs, _, name = where.rstrip("/").rpartition("/")
        draft.set("name", "".join(c if c.isalnum() or c in "._-" else "-" for c in name) or "from-megatron")
        draft.set("runs_dir", runs or ".")
        draft.notes.append(
            "--save and --load: a run has one directory, and always resumes from its newest checkpoint; to start from Megatron's "
            f"checkpoint, `argosy ckpt import megatron:{first_word(given, 'load') or where} --to DIR` and init_from=DIR"
        )


def _sinks(draft: Draft, given: dict[str, Values]) -> None:
    """Translate TensorBoard and W&B. `log.sinks.wandb` is a project, or entity/project."""
    if "tensorboard-dir" in given:
        draft.set("log.sinks.tensorboard", True)
    project, entity = (first_word(given, f"wandb-{name}") for name in ("project", "entity"))
    if project:
        draft.set("log.sinks.wandb", f"{entity}/{project}" if entity else project)
    elif entity:
        draft.notes.append("--wandb-entity: ignored, as in Megatron without --wandb-project")


def _pipeline(draft: Draft, given: dict[str, Values]) -> None:
    """Translate virtual pipeline stages, and expert parallelism, which needs as many dp_shard ranks."""
    if (experts := draft.get("parallel.ep", 1)) > 1:
        draft.set("parallel.dp_shard", experts)
        draft.notes.append(f"parallel.dp_shard is the minimum for ep {experts}: raise it to use all your GPUs")
    ranks, layers = draft.get("parallel.pp", 1), draft.get("model.layers", 0)
    if "num-layers-per-virtual-pipeline-stage" in given:
        each = read_value("num-layers-per-virtual-pipeline-stage", given["num-layers-per-virtual-pipeline-stage"], int)
        stages = layers // ranks // each
    elif "num-virtual-stages-per-pipeline-rank" in given:
        stages = read_value("num-virtual-stages-per-pipeline-rank", given["num-virtual-stages-per-pipeline-rank"], int)
    else:
        return
    if stages > 1:
        draft.set("parallel.schedule", "interleaved-1f1b")
        draft.set("parallel.vpp", stages)


def _evaluation(draft: Draft, given: dict[str, Values]) -> None:
    iterations = read_value("eval-iters", given.get("eval-iters") or ["100"], int)
    split = draft.get("data.split")
    if iterations == 0 or (split is not None and split[1] == 0 and not draft.get("data.validation")):
        draft.set("eval", "off")
        return
    draft.set("eval.batches", iterations)
    draft.set("eval.every", read_value("eval-interval", given.get("eval-interval") or ["1000"], _steps))

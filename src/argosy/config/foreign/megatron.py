"""`argosy config from-megatron`: the arguments of Megatron-LM's pretrain_gpt.py as a run spec.

Every argument is translated, known to be needless here, or listed as having no counterpart; none is passed over in silence.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from argosy.config.foreign.draft import Draft
from argosy.errors import ArgosyError

Values = list[str]


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text and "e" not in text.lower() else value


def _steps(text: str) -> str:
    return f"{int(text)}ba"


# argument -> (key, how its one value is read)
_PLAIN: dict[str, tuple[str, Callable[[str], Any]]] = {
    "num-layers": ("model.layers", int),
    "hidden-size": ("model.hidden", int),
    "ffn-hidden-size": ("model.ffn", int),
    "num-attention-heads": ("model.heads", int),
    "num-query-groups": ("model.kv_heads", int),
    "kv-channels": ("model.head_dim", int),
    "max-position-embeddings": ("model.max_seq_len", int),
    "vocab-size": ("model.vocab_size", int),
    "padded-vocab-size": ("model.vocab_size", int),
    "rotary-base": ("model.rope_theta", _number),
    "norm-epsilon": ("model.norm_eps", _number),
    "init-method-std": ("model.init_std", _number),
    "num-experts": ("model.moe.experts", int),
    "moe-router-topk": ("model.moe.top_k", int),
    "moe-ffn-hidden-size": ("model.moe.ffn", int),
    "moe-aux-loss-coeff": ("model.moe.balance_loss", _number),
    "moe-z-loss-coeff": ("model.moe.z_loss", _number),
    "seq-length": ("data.seq_len", int),
    "tokenizer-model": ("data.tokenizer", str),
    "data-cache-path": ("data.order_cache", str),
    "global-batch-size": ("train.global_batch", int),
    "train-iters": ("train.steps", int),
    "train-samples": ("train.samples", int),
    "seed": ("train.seed", int),
    "lr": ("optim.lr", _number),
    "min-lr": ("optim.min_lr", _number),
    "weight-decay": ("optim.weight_decay", _number),
    "adam-eps": ("optim.eps", _number),
    "clip-grad": ("optim.clip", _number),
    "lr-warmup-iters": ("optim.warmup", _steps),
    "lr-warmup-samples": ("optim.warmup", lambda text: f"{int(text)}sp"),
    "lr-wsd-decay-iters": ("optim.decay", _steps),
    "micro-batch-size": ("parallel.micro_batch", int),
    "tensor-model-parallel-size": ("parallel.tp", int),
    "pipeline-model-parallel-size": ("parallel.pp", int),
    "context-parallel-size": ("parallel.cp", int),
    "expert-model-parallel-size": ("parallel.ep", int),
    "save-interval": ("checkpoint.every", _steps),
    "log-interval": ("log.every", _steps),
    "wandb-project": ("log.sinks.wandb", str),
}
_SWITCHES: dict[str, tuple[str, Any]] = {
    "bf16": ("train.precision", "bf16"),
    "fp16": ("train.precision", "fp16"),
    "fp8-format": ("train.precision", "fp8"),
    "swiglu": ("model.activation", "swiglu"),
    "qk-layernorm": ("model.qk_norm", True),
    "reset-position-ids": ("data.reset_positions", True),
    "reset-attention-mask": ("data.document_mask", True),
    "eod-mask-loss": ("data.mask_eod", True),
    "recompute-activations": ("parallel.recompute", "selective"),
    "untie-embeddings-and-output-weights": ("model.tied", False),
}
# What Argosy does anyway, does otherwise, or needs not.
_NEEDLESS = {
    "sequence-parallel": "always on with tensor parallelism",
    "use-distributed-optimizer": "the optimiser's state is sharded where parallel.dp_shard is above 1",
    "overlap-grad-reduce": "always on",
    "overlap-param-gather": "always on",
    "use-mcore-models": "there is one set of models",
    "transformer-impl": "there is one implementation",
    "attention-backend": "chosen by what the device has",
    "use-flash-attn": "chosen by what the device has",
    "distributed-backend": "NCCL on GPUs, gloo on CPUs",
    "distributed-timeout-minutes": "the supervisor ends what stands still (fault.stall_after)",
    "dataloader-type": "the order of samples is a function of the seed",
    "num-workers": "batches are read ahead by a thread",
    "ckpt-format": "there is one format, which any layout reads",
    "use-dist-ckpt": "there is one format, which any layout reads",
    "ckpt-fully-parallel-load": "always on",
    "ckpt-fully-parallel-save": "always on",
    "ckpt-assume-constant-structure": "nothing is cached between saves",
    "use-persistent-ckpt-worker": "saving is done by Argosy's own writer",
    "async-save": "saving is done by Argosy's own writer",
    "exit-signal-handler": "SIGTERM and Ctrl-C always save",
    "accumulate-allreduce-grads-in-fp32": "parallel.reduce is fp32 unless it is set",
    "attention-softmax-in-fp32": "always",
    "group-query-attention": "num-query-groups says it",
    "no-load-optim": "a run goes on with its optimiser's state",
    "no-load-rng": "there is no generator state to load",
    "no-masked-softmax-fusion": "kernels are chosen by what the device has",
    "no-gradient-accumulation-fusion": "kernels are chosen by what the device has",
    "bias-gelu-fusion": "kernels are chosen by what the device has",
    "tensorboard-dir": "curves are in the run directory; `argosy dash` shows them",
    "use-sharp": "cluster.sharp, where InfiniBand switches can do it",
    "mock-data": "`argosy bench` trains on made-up data",
    "lr-decay-iters": "the schedule ends with the run",
    "lr-decay-samples": "the schedule ends with the run",
    "tokenizer-type": "the tokenizer's files say which it is",
    "train-data-path": "", "valid-data-path": "", "test-data-path": "", "data-path": "", "split": "",
    "eval-interval": "", "eval-iters": "", "position-embedding-type": "", "normalization": "", "lr-decay-style": "",
    "adam-beta1": "", "adam-beta2": "", "recompute-granularity": "", "save": "", "load": "", "optimizer": "",
    "hidden-dropout": "", "attention-dropout": "", "disable-bias-linear": "", "rampup-batch-size": "",
    "lr-warmup-fraction": "", "vocab-file": "", "merge-file": "", "use-rotary-position-embeddings": "",
}  # fmt: skip


def from_megatron(command: str) -> Draft:
    """`torchrun … pretrain_gpt.py --num-layers 24 …`, or only the arguments."""
    given = _arguments(command)
    draft = Draft({"name": "from-megatron"})
    _structure(draft, given)
    for name, values in given.items():
        if name in _PLAIN:
            key, read = _PLAIN[name]
            draft.set(key, _read(name, values, read))
        elif name in _SWITCHES:
            draft.set(*_SWITCHES[name])
        elif name in _NEEDLESS:
            if _NEEDLESS[name]:
                draft.notes.append(f"--{name}: {_NEEDLESS[name]}")
        else:
            draft.left.append(f"--{name} {' '.join(values)}".strip())
    _data(draft, given)
    _training(draft, given)
    if "train" in draft.tree and "global_batch" not in draft.tree["train"] and "micro-batch-size" in given:
        draft.notes.append(
            "no --global-batch-size: Megatron's would be micro-batch x data-parallel ranks; set train.global_batch"
        )
    return draft


def _arguments(command: str) -> dict[str, Values]:
    """Arguments by name. What stands before the script is the launcher's, and `argosy launch` is ours."""
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ArgosyError("config.bad-value", f"the command cannot be read: {error}", fix="close its quotes") from None
    scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
    words = words[scripts[-1] + 1 :] if scripts else words
    found: dict[str, Values] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("_", "-").partition("=")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name].append(word)
    if "num-layers" not in found and "hidden-size" not in found:
        raise ArgosyError(
            "config.bad-value",
            "there is no --num-layers or --hidden-size among the arguments",
            fix="give the arguments of pretrain_gpt.py in one pair of quotes",
        )
    return found


def _read(name: str, values: Values, read: Callable[[str], Any]) -> Any:
    try:
        return read(values[0])
    except (ValueError, IndexError):
        raise ArgosyError(
            "config.bad-value",
            f"--{name} {' '.join(values)} cannot be read",
            key=f"--{name}",
            fix="variables have to be filled in",
        ) from None


def _one(given: dict[str, Values], name: str, default: str = "") -> str:
    return (given.get(name) or [default])[0]


def _structure(draft: Draft, given: dict[str, Values]) -> None:
    """The family that is nearest, and where the model differs from it."""
    rope = (
        _one(given, "position-embedding-type", "learned_absolute") == "rope"
        or "use-rotary-position-embeddings" in given
    )
    rms = _one(given, "normalization", "LayerNorm") == "RMSNorm"
    draft.set("model.family", "llama" if rope and rms and "swiglu" in given else "gpt")
    draft.set("model.positions", "rope" if rope else "learned")
    draft.set("model.norm", "rmsnorm" if rms else "layernorm")
    draft.set("model.norm_bias", not rms)
    bias = "disable-bias-linear" not in given
    draft.set("model.attention_bias", bias)
    draft.set("model.mlp_bias", bias)
    draft.set("model.tied", True)
    if "swiglu" not in given:
        draft.set("model.activation", "gelu")
    elif "ffn-hidden-size" not in given and "hidden-size" in given:
        draft.set("model.ffn", int(4 * int(_one(given, "hidden-size")) * 2 / 3 / 64) * 64)  # as Megatron derives it
    dropouts = {float(_one(given, name, "0.1")) for name in ("hidden-dropout", "attention-dropout")}
    draft.set("model.dropout", min(dropouts))
    if len(dropouts) > 1:
        draft.notes.append(f"dropout is one number here: {min(dropouts):g} of {sorted(dropouts)}")
    if _one(given, "vocab-size") == "" and _one(given, "padded-vocab-size") == "":
        draft.set("model.vocab_size", 50304)
        draft.notes.append("model.vocab_size is GPT-2's, padded to a multiple of 128: set your tokenizer's")


def _data(draft: Draft, given: dict[str, Values]) -> None:
    words = given.get("data-path") or given.get("train-data-path") or []
    if not words:
        draft.notes.append("no --data-path: set data.train")
        draft.set("data.train", "corpus")
    elif len(words) == 1:
        draft.set("data.train", [{"path": words[0]}])
    else:
        pairs = list(zip(words[::2], words[1::2], strict=False))
        draft.set("data.train", [{"path": path, "weight": _number(weight)} for weight, path in pairs])
    if "valid-data-path" in given or "test-data-path" in given:
        draft.left.append(
            "--valid-data-path and --test-data-path: held-out documents are a share of each corpus (data.split)"
        )
    if "split" in given:
        draft.set("data.split", [float(part) for part in _one(given, "split").split(",")])
    if "vocab-file" in given:
        draft.set("data.tokenizer", _one(given, "vocab-file").rpartition("/")[0] or ".")
        draft.notes.append("data.tokenizer is the directory of --vocab-file, with merges.txt beside it")
    draft.set("data.order", "megatron")
    draft.notes.append(
        "data.order: megatron gives Megatron's own order of samples; leave it out for ours, which needs no index"
    )


def _training(draft: Draft, given: dict[str, Values]) -> None:
    style = _one(given, "lr-decay-style", "linear")
    known = {
        "cosine": "cosine",
        "linear": "linear",
        "constant": "constant",
        "inverse-square-root": "inverse_sqrt",
        "WSD": "wsd",
    }
    draft.set("optim.schedule", known.get(style, "cosine"))
    if style not in known:
        draft.left.append(f"--lr-decay-style {style}")
    draft.set("optim.betas", [_number(_one(given, "adam-beta1", "0.9")), _number(_one(given, "adam-beta2", "0.999"))])
    draft.set("optim.name", {"adam": "adamw", "muon": "muon"}.get(_one(given, "optimizer", "adam"), "adamw"))
    if "lr-warmup-fraction" in given and (steps := draft.get("train.steps")) is not None:
        draft.set("optim.warmup", f"{round(float(_one(given, 'lr-warmup-fraction')) * steps)}ba")
    if "rampup-batch-size" in given:
        start, increment, samples = (int(word) for word in given["rampup-batch-size"][:3])
        draft.set("train.batch_rampup", {"start": start, "increment": increment, "samples": samples})
    if _one(given, "recompute-granularity") in ("full", "selective"):
        draft.set("parallel.recompute", _one(given, "recompute-granularity"))
    _evaluation(draft, given)
    where = _one(given, "save") or _one(given, "load")
    if where:
        runs, _, name = where.rstrip("/").rpartition("/")
        draft.set("name", "".join(c if c.isalnum() or c in "._-" else "-" for c in name) or "from-megatron")
        draft.set("runs_dir", runs or ".")
        draft.notes.append("--save and --load: a run has one directory, and always goes on from its newest checkpoint")


def _evaluation(draft: Draft, given: dict[str, Values]) -> None:
    iterations = int(_one(given, "eval-iters", "100"))
    split = draft.get("data.split")
    if iterations == 0 or (split is not None and split[1] == 0):
        draft.set("eval", "off")
        return
    draft.set("eval.batches", iterations)
    draft.set("eval.every", _steps(_one(given, "eval-interval", "1000")))

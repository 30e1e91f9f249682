"""The model that Megatron's arguments describe: its family in Argosy, and the keys that differ from the family."""

from __future__ import annotations

from argosy.config.foreign.draft import Draft
from argosy.config.foreign.megatron_words import Arguments, first_word, read_value
from argosy.errors import ArgosyError

# Arguments that this module reads.
MODEL_ARGUMENTS = (
    "position-embedding-type", "use-rotary-position-embeddings", "normalization", "disable-bias-linear", "swiglu",
    "hidden-dropout", "attention-dropout", "openai-gelu", "no-bias-gelu-fusion", "bert-no-binary-head", "rotary-percent",
    "use-rope-scaling", "rope-scaling-factor", "rotary-seq-len-interpolation-factor", "moe-router-load-balancing-type",
    "biencoder-projection-dim", "retriever-score-scaling",
)  # fmt: skip
_SCRIPTS = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5", "pretrain_ict.py": "ict"}
# The original sequence length that Megatron's --use-rope-scaling extends.
_LLAMA3_SEQ_LEN = 8192


def family_of(script: str, given: Arguments) -> str:
    """Return what is trained: from the script, and for decoders from positions, norm and activation.

    It is a model family of Argosy, or `ict`: two towers of the family `bert`.
    """
    family = _SCRIPTS.get(script, "gpt")
    if script.startswith("pretrain_") and script not in _SCRIPTS:
        raise ArgosyError(
            "config.bad-value",
            f"{script} trains a model that Argosy does not have",
            key="script",
            value=script,
            fix=f"give the arguments of one of {', '.join(_SCRIPTS)}",
        )
    if not script and ("encoder-num-layers" in given or "decoder-num-layers" in given):
        family = "t5"
    if family == "gpt" and _rope(given) and _rms(given) and "swiglu" in given:
        return "llama"
    return family


def describe_model(draft: Draft, family: str, given: Arguments) -> None:
    draft.set("model.family", "bert" if family == "ict" else family)
    if family in ("gpt", "llama"):
        _decoder(draft, given)
        _rotary(draft, given)
        _experts(draft, given)
    elif family == "bert":
        _bert(draft, given)
    elif family == "ict":
        _retriever(draft, given)
    else:
        _t5(draft, given)
    # Megatron's default, which differs from that of some families.
    if draft.get("model.norm_eps") is None:
        draft.set("model.norm_eps", 1e-5)
    _grouped(draft, given)
    dropouts = {float(first_word(given, name, "0.1")) for name in ("hidden-dropout", "attention-dropout")}
    draft.set("model.dropout", min(dropouts))
    if len(dropouts) > 1:
        draft.notes.append(f"dropout is one number here: {min(dropouts):g} of {sorted(dropouts)}")
    if draft.get("model.vocab_size") is None:
        guess = (
            32000
            if first_word(given, "tokenizer-type") == "Llama2Tokenizer"
            else {"bert": 30522, "ict": 30522, "t5": 32128}.get(family)
        )
        draft.set("model.vocab_size", guess or 50257)
        draft.notes.append(
            "model.vocab_size is a guess, because Megatron reads it from the tokenizer: set your tokenizer's size"
        )


def _rope(given: Arguments) -> bool:
    return first_word(given, "position-embedding-type") == "rope" or "use-rotary-position-embeddings" in given


def _rms(given: Arguments) -> bool:
    return first_word(given, "normalization") == "RMSNorm"


def _decoder(draft: Draft, given: Arguments) -> None:
    positions = first_word(given, "position-embedding-type", "learned_absolute")
    if not _rope(given) and positions != "learned_absolute":
        draft.left.append(f"--position-embedding-type {positions}: replaced by learned positions")
    draft.set("model.positions", "rope" if _rope(given) else "learned")
    draft.set("model.norm", "rmsnorm" if _rms(given) else "layernorm")
    draft.set("model.norm_bias", not _rms(given))
    bias = "disable-bias-linear" not in given
    draft.set("model.attention_bias", bias)
    draft.set("model.mlp_bias", bias)
    if draft.get("model.tied") is None:
        draft.set("model.tied", True)
    if "swiglu" in given:
        draft.set("model.activation", "swiglu")
        if "ffn-hidden-size" not in given and (hidden := draft.get("model.hidden")) is not None:
            # Megatron's default.
            draft.set("model.ffn", int(4 * hidden * 2 / 3 / 64) * 64)
    else:
        draft.set("model.activation", _gelu(given))


def _gelu(given: Arguments) -> str:
    """Return the kind of GELU. Megatron's fused bias-GELU kernel has the tanh approximation; without it GELU is exact."""
    fused = "disable-bias-linear" not in given and "no-bias-gelu-fusion" not in given
    return "gelu_tanh" if fused or "openai-gelu" in given else "gelu"


def _rotary(draft: Draft, given: Arguments) -> None:
    if float(first_word(given, "rotary-percent", "1")) != 1:
        draft.left.append(f"--rotary-percent {first_word(given, 'rotary-percent')}: rope always rotates the whole head")
    if "use-rope-scaling" in given:
        factor = float(first_word(given, "rope-scaling-factor", "8"))
        scaling = {"kind": "llama3", "factor": factor, "original_seq_len": _LLAMA3_SEQ_LEN}
        draft.set("model.rope_scaling", scaling)
    elif "rotary-seq-len-interpolation-factor" in given:
        factor = float(first_word(given, "rotary-seq-len-interpolation-factor"))
        draft.set("model.rope_scaling", {"kind": "linear", "factor": factor})


def _experts(draft: Draft, given: Arguments) -> None:
    if draft.get("model.moe.experts") is None:
        return
    inner = draft.get("model.ffn") or 4 * draft.get("model.hidden", 0)
    for key, value in (("top_k", 2), ("ffn", inner), ("balance_loss", 0.0)):
        if draft.get(f"model.moe.{key}") is None:
            draft.set(f"model.moe.{key}", value)
    balancing = first_word(given, "moe-router-load-balancing-type", "aux_loss")
    if balancing == "none":
        draft.set("model.moe.balance_loss", 0.0)
    elif balancing != "aux_loss":
        draft.left.append(f"--moe-router-load-balancing-type {balancing}: replaced by the load-balancing loss")


def _grouped(draft: Draft, given: Arguments) -> None:
    """Drop --num-query-groups if --group-query-attention is not given, as Megatron does."""
    if "num-query-groups" in given and "group-query-attention" not in given:
        draft.tree["model"].pop("kv_heads", None)
        draft.notes.append("--num-query-groups: ignored, as in Megatron without --group-query-attention")


def _bert(draft: Draft, given: Arguments) -> None:
    draft.set("model.activation", _gelu(given))
    draft.set("model.pair", "none" if "bert-no-binary-head" in given else "nsp")
    draft.left.append("Megatron's BERT is pre-norm; Argosy's is post-norm, as in the paper")


def _retriever(draft: Draft, given: Arguments) -> None:
    """Translate the two towers of pretrain_ict.py. Without a projection their vectors have the hidden width."""
    _bert(draft, given)
    draft.set("model.pair", "none")
    if draft.get("model.retrieval.shared") is None:
        draft.set("model.retrieval.shared", False)
    width = read_value("biencoder-projection-dim", given.get("biencoder-projection-dim") or ["0"], int)
    if width:
        draft.set("model.retrieval.projection", width)
    if "retriever-score-scaling" not in given:
        draft.left.append(
            "no --retriever-score-scaling: scores are always divided by the root of the vectors' width here"
        )
    draft.left.append(
        "a query's wrong answers are the other blocks of its micro-batch; Megatron adds those of other ranks"
    )


def _t5(draft: Draft, given: Arguments) -> None:
    positions = first_word(given, "position-embedding-type", "learned_absolute")
    if positions != "relative":
        draft.left.append(f"--position-embedding-type {positions}: T5 has relative positions here, as in the paper")
    if not _rms(given):
        draft.left.append("--normalization LayerNorm: T5 has RMSNorm here, as in the paper")
    draft.set("model.activation", "geglu" if "swiglu" in given else _gelu(given))
    if "swiglu" in given:
        draft.left.append("--swiglu: replaced by geglu, as in T5 1.1")
    std = draft.tree["model"].pop("init_std", None)
    if std is not None:
        draft.left.append(f"--init-method-std {std:g}: T5's weights are initialised by the fan-in of each matrix")

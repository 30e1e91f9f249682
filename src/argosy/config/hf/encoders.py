"""bert and t5."""

from __future__ import annotations

from typing import Any

from argosy.config.hf.decoders import ACTIVATIONS, activation_name
from argosy.config.hf.keys import Keys
from argosy.config.model import ModelSpec

Tree = dict[str, Any]
_WITH_PAIRS, _WITHOUT = "BertForPreTraining", "BertForMaskedLM"
# Google's Chinese and multilingual models carry the settings of a pooler that no code has.
_OLD_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")


def read_bert(keys: Keys) -> Tree:
    keys.only("position_embedding_type", "absolute")
    keys.only("directionality", "bidi")
    keys.ignore("no code has that pooler", *(f"pooler_{name}" for name in _OLD_POOLER))
    return {
        "family": "bert",
        "layers": keys.take("num_hidden_layers", 12),
        "hidden": keys.take("hidden_size", 768),
        "heads": keys.take("num_attention_heads", 12),
        "ffn": keys.take("intermediate_size", 3072),
        "vocab_size": keys.take("vocab_size", 30522),
        "max_seq_len": keys.take("max_position_embeddings", 512),
        "type_vocab_size": keys.take("type_vocab_size", 2),
        "pair": "nsp" if _WITH_PAIRS in keys.listing("architectures") else "none",
        "activation": keys.choice("hidden_act", ACTIVATIONS, "gelu"),
        "norm_eps": keys.take("layer_norm_eps", 1e-12),
        "tied": keys.take("tie_word_embeddings", True),
        "dropout": keys.same("hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1),
        "init_std": keys.take("initializer_range", 0.02),
    }


def write_bert(spec: ModelSpec) -> Tree:
    return {
        "architectures": [_WITH_PAIRS if spec.judges_pairs else _WITHOUT],
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "type_vocab_size": spec.type_vocab_size,
        "hidden_act": activation_name(spec),
        "layer_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "hidden_dropout_prob": spec.dropout,
        "attention_probs_dropout_prob": spec.dropout,
        "initializer_range": spec.init_std,
    }


# Of feed_forward_proj: our activation, and what transformers makes of the word and also stores (their "gated-gelu" is a tanh).
_T5_ACTIVATIONS = {
    "relu": ("relu", "relu"),
    "gelu": ("gelu", "gelu"),
    "gelu_new": ("gelu_tanh", "gelu_new"),
    "gated-gelu": ("geglu", "gelu_new"),
    "gated-gelu_new": ("geglu", "gelu_new"),
    "gated-silu": ("swiglu", "silu"),
}
_T5_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "geglu": "gated-gelu", "swiglu": "gated-silu"}


def read_t5(keys: Keys) -> Tree:
    keys.only("relative_attention_num_buckets", 32)
    keys.only("relative_attention_max_distance", 128)
    keys.only("is_encoder_decoder", True)
    keys.ignore("transformers sets it for each of the two stacks", "is_decoder")
    activation, function = keys.choice("feed_forward_proj", _T5_ACTIVATIONS, "relu")
    keys.only("dense_act_fn", function)  # where a file has them, they win over feed_forward_proj
    keys.only("is_gated_act", activation.endswith("glu"))
    # Our samples begin a target with the padding token, as every published T5 does.
    pad = keys.take("pad_token_id", 0, null=True)
    if (start := keys.take("decoder_start_token_id", None)) not in (pad, None):
        raise keys.refuse(
            "decoder_start_token_id", start, f"pad_token_id is {pad!r}, and Argosy begins a target with that"
        )
    # A head of its own goes with logits that are not scaled; transformers 5 only keeps the latter.
    tied = keys.take("tie_word_embeddings", True, null=True) is not False
    scaled = keys.take("scale_decoder_outputs", tied)
    if scaled and not tied:
        raise keys.refuse(
            "scale_decoder_outputs", scaled, "tie_word_embeddings is False, and Argosy scales a tied head only"
        )
    return {
        "family": "t5",
        "layers": keys.take("num_layers", 6),
        "decoder_layers": keys.take("num_decoder_layers", None),
        "hidden": keys.take("d_model", 512),
        "heads": keys.take("num_heads", 8),
        "head_dim": keys.take("d_kv", 64),
        "ffn": keys.take("d_ff", 2048),
        "vocab_size": keys.take("vocab_size", 32128),
        "max_seq_len": keys.take("n_positions", 512),
        "activation": activation,
        "norm_eps": keys.take("layer_norm_epsilon", 1e-6),
        "tied": bool(scaled),
        "dropout": keys.take("dropout_rate", 0.1),
        "init_std": keys.take("initializer_factor", 1.0),
    }


def write_t5(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "num_layers": spec.layers,
        "num_decoder_layers": spec.decoder_layers,
        "d_model": spec.hidden,
        "num_heads": spec.heads,
        "d_kv": spec.head_dim,
        "d_ff": spec.ffn,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_seq_len,
        "feed_forward_proj": _T5_NAMES[spec.activation],
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "dropout_rate": spec.dropout,
        "initializer_factor": spec.init_std,
        "decoder_start_token_id": 0,
    }

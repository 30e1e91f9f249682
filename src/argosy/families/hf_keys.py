"""Read a config.json key by key.

Every key is converted, held to the values we can represent, or ignored for a stated reason. Any other key is refused, because
it may change what the model computes or how it is trained. A key added by a new version of transformers is therefore never
dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.config.model import ModelSpec
from argosy.config.units import LARGEST_NUMBER, MOST_LAYERS
from argosy.errors import ArgosyError

READ, HELD = "read", "held"
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_ACTIVATION_NAMES = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
_IGNORED_BECAUSE: dict[str, tuple[str, ...]] = {
    "it names the file, its author's program, or the class that loads it": (
        "model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path", "tokenizer_class",
        "_flash_attn_2_enabled", "max_sequence_length", "transformers.js_config", "unsloth_fixed", "unsloth_version",
        "xla_device", "tf_legacy_loss", "use_bfloat16", "finetuning_task", "task_specific_params",
    ),
    "weights keep the precision they are stored in; train.precision says what they are trained in": ("dtype", "torch_dtype"),
    "it chooses what transformers returns, keeps or recomputes, not what it computes": (
        "use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_past", "gradient_checkpointing",
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation",
        "chunk_size_feed_forward", "pretraining_tp",
    ),
    "it is of a classification head, which no language model has": (
        "id2label", "label2id", "num_labels", "_num_labels", "problem_type", "classifier_dropout",
    ),
    "token ids are kept beside the model spec; they decide which tokens a sample has, not what a model makes of them": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id",
        "eos_token_ids", "decoder_start_token_id", "decoder_bos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    ),
    "it is of generation": (
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
        "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "prefix",
    ),
}  # fmt: skip
# Keys without effect in every family, with the reason. A family's reader adds its own (`Keys.ignore`).
IGNORED = {key: reason for reason, keys in _IGNORED_BECAUSE.items() for key in keys}
# Keys of every config class that describe a different model unless they have these values.
_HELD: tuple[tuple[str, Any], ...] = (
    ("is_encoder_decoder", False),
    ("is_decoder", False),
    ("add_cross_attention", False),
    ("cross_attention_hidden_size", None),
    ("tie_encoder_decoder", False),
    # With torchscript, transformers 4 copies tied weights, so that training moves them apart.
    ("torchscript", False),
    ("pruned_heads", {}),
)


class Keys:
    """The keys of one JSON object. `fates` says how each was handled: "read", "held", or why it is ignored."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.fates: dict[str, str] = dict(IGNORED)
        self._document = document

    def take(self, key: str, default: Any, *, null: bool = False) -> Any:
        """Return the value of a key, or `default` if it is missing.

        A key set to null is refused, unless null is a value of its own (`null`) or the default: we never replace one of their
        values with a default of ours.
        """
        self.fates[key] = READ
        value = self._document.get(key, default)
        if value is None and default is not None and not null:
            raise self.refuse(key, None, f"a value belongs here, such as {default!r}")
        # NaN is not within the limits either.
        if isinstance(value, int | float) and not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
            shown = value if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
            raise self.refuse(key, shown, f"a number of at most {LARGEST_NUMBER:g} belongs here")
        return value

    def count(self, key: str, default: int, *, least: int | None = None, most: int | None = None) -> int:
        """Return a whole number that is needed to read other keys, from `least` to `most`."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise self.refuse(key, value, "a whole number belongs here")
        if (least is not None and value < least) or (most is not None and value > most):
            limits = [f"of at least {least:,}"] if least is not None else []
            limits += [f"of at most {most:,}"] if most is not None else []
            raise self.refuse(key, value, f"a whole number {' and '.join(limits)} belongs here")
        return int(value)

    def depth(self, key: str, default: int) -> int:
        """Return a number of layers. It is safe to make a list of that length."""
        return self.count(key, default, least=1, most=MOST_LAYERS)

    def choice(self, key: str, known: Mapping[Any, Any], default: Any) -> Any:
        """Return our value for theirs, from the mapping `known`. Other values are refused."""
        value = self.take(key, default)
        if not isinstance(value, str | int | float | bool | None) or value not in known:
            raise self.refuse(key, value, f"only {' or '.join(repr(word) for word in known)} can be represented")
        return known[value]

    def listing(self, key: str) -> list[Any]:
        """Return a list, empty if the key is missing."""
        value = self.take(key, None) or []
        if not isinstance(value, list):
            raise self.refuse(key, value, "a list belongs here")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a key unless its value is one we can represent. The first allowed value is the default."""
        value = self.take(key, allowed[0], null=None in allowed)
        self.fates[key] = HELD
        if value not in allowed:
            raise self.refuse(key, value, f"only {' or '.join(repr(word) for word in allowed)} can be represented")

    def same(self, *keys: str, default: Any) -> Any:
        """Return the one value that several of their keys must share."""
        values = {key: self.take(key, default) for key in keys}
        first = values[keys[0]]
        for key, value in values.items():
            if value != first:
                raise self.refuse(key, value, f"it differs from {keys[0]} {first!r}, and Argosy has one value for both")
        return first

    def section(self, key: str) -> Keys:
        value = self.take(key, None) or {}
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "a set of keys belongs here")
        return Keys(value, f"{self.where}: {key}")

    def ignore(self, reason: str, *keys: str) -> None:
        """Ignore keys that have no effect on what Argosy computes, for the given reason."""
        self.fates |= dict.fromkeys(keys, reason)

    def finish(self) -> None:
        """Refuse keys that no reader has handled. A null key asks for nothing and passes."""
        for key, allowed in _HELD:
            if key not in self.fates:
                self.only(key, allowed)
        for key, value in self._document.items():
            if value is not None and key not in self.fates:
                why = "Argosy does not know it, and it may change what the model computes or how it is trained"
                raise self.refuse(key, value, why)

    def refuse(self, key: str, value: Any, why: str, fix: str | None = None) -> ArgosyError:
        return ArgosyError(
            "hf.unsupported",
            f"{self.where} has {key} = {value!r}: {why}",
            key=key,
            value=value,
            fix=fix
            or "choose a model without it; if you know it changes no numbers, take it out of a copy of config.json",
        )


def activation_name(spec: ModelSpec) -> str:
    """Return Hugging Face's name for the activation of an MLP without a gate."""
    if spec.activation not in _ACTIVATION_NAMES:
        raise ArgosyError(
            "hf.unsupported",
            f"in Hugging Face's class for the family {spec.family} the MLP has no gate",
            key="model.activation",
            value=spec.activation,
            fix=f"only a model with {' or '.join(_ACTIVATION_NAMES)} can be exported",
        )
    return _ACTIVATION_NAMES[spec.activation]

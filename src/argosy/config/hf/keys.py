"""A config.json read key by key: every key is taken over, held to the values we can represent, or known to be harmless.
One that is none of these is refused, since it may change what the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.errors import ArgosyError

# About files, tokens, labels, caches and generation, not about what a forward pass computes.
HARMLESS = frozenset(
    [
        "model_type",
        "architectures",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "dtype",
        "torch_dtype",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_past",
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "unk_token_id",
        "mask_token_id",
        "eos_token_ids",
        "decoder_start_token_id",
        "decoder_bos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "remove_invalid_values",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "prefix",
        "tokenizer_class",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "gradient_checkpointing",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "classifier_dropout",
        "pretraining_tp",
        "tie_encoder_decoder",
        "output_router_logits",
        # Written by programs that trained or repacked the model; transformers reads none of them.
        "_flash_attn_2_enabled",
        "max_sequence_length",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "xla_device",
    ]
)


class Keys:
    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._document = document
        self._seen: set[str] = set()

    def take(self, key: str, default: Any, *, null: bool = False) -> Any:
        """The value of a key, or what a missing one means. A key set to nothing is refused, unless that is a value of its own
        (`null`) or what a missing key means: no default of ours is put in place of one of theirs."""
        self._seen.add(key)
        value = self._document.get(key, default)
        if value is None and default is not None and not null:
            raise self.refuse(key, None, f"a value belongs here, such as {default!r}")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number that is needed to read other keys."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise self.refuse(key, value, "a whole number belongs here")
        return int(value)

    def choice(self, key: str, known: Mapping[Any, Any], default: Any) -> Any:
        """Our word for theirs; a value we have no word for is refused."""
        value = self.take(key, default)
        if not isinstance(value, str | int | float | bool | None) or value not in known:
            raise self.refuse(key, value, f"only {' or '.join(repr(word) for word in known)} can be represented")
        return known[value]

    def listing(self, key: str) -> list[Any]:
        """A list; a missing one is empty."""
        value = self.take(key, None) or []
        if not isinstance(value, list):
            raise self.refuse(key, value, "a list belongs here")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Held to the values we can represent; the first of them is what a missing key means."""
        value = self.take(key, allowed[0], null=None in allowed)
        if value not in allowed:
            raise self.refuse(key, value, f"only {' or '.join(repr(word) for word in allowed)} can be represented")

    def same(self, *keys: str, default: Any) -> Any:
        """One value that several of their keys must share."""
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

    def harmless(self, *keys: str) -> None:
        self._seen.update(keys)

    def finish(self) -> None:
        """Refuse what nobody looked at. A key that is set to nothing asks for nothing."""
        for key, value in self._document.items():
            asks = value is not None and value is not False and value != {} and value != []
            if asks and key not in self._seen and key not in HARMLESS:
                raise self.refuse(key, value, "Argosy does not know it, and it may change what the model computes")

    def refuse(self, key: str, value: Any, why: str, fix: str | None = None) -> ArgosyError:
        return ArgosyError(
            "hf.unsupported",
            f"{self.where} has {key} = {value!r}: {why}",
            key=key,
            value=value,
            fix=fix
            or "choose a model without it; if you know it changes no numbers, take it out of a copy of config.json",
        )

"""The tokenizer files of an exported model, for AutoTokenizer.

Files that came with the model are kept. Missing ones are made from the tokenizer.json of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from argosy.checkpoint.source import Source
from argosy.config.model import ModelSpec
from argosy.data.text.tokenizer import EOD_NAMES, ByteTokenizer

# Token roles of transformers, and the usual token names for each.
_ROLES = {
    "unk_token": ("[UNK]", "<unk>"),
    "pad_token": ("[PAD]", "<pad>", "<|pad|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]",),
}


def write_tokenizer(source: Source, spec: ModelSpec, to: Path) -> list[str]:
    """Write the missing tokenizer files to `to`, and return notes for the user."""
    tokenizer = source.tokenizer()
    if tokenizer is None:
        return []
    if isinstance(tokenizer, ByteTokenizer):
        (to / "tokenizer.json").write_text(_bytes_as_bpe(), encoding="utf-8")
    if not (to / "tokenizer.json").exists():
        if (to / "tokenizer_config.json").exists() or (to / "vocab.json").exists():
            return []
        return ["the tokenizer is a SentencePiece model: AutoTokenizer needs its tokenizer_config.json beside it"]
    from tokenizers import Tokenizer as Engine

    engine = Engine.from_file(str(to / "tokenizer.json"))
    if not (to / "tokenizer_config.json").exists():
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.max_seq_len,
            "clean_up_tokenization_spaces": False,
            "model_input_names": _inputs(spec),
        }
        eod = None if source.eod_id is None else engine.id_to_token(source.eod_id)
        if eod is not None:
            settings |= {"bos_token": eod, "eos_token": eod}
        found = {role: [n for n in names if engine.token_to_id(n) is not None] for role, names in _ROLES.items()}
        settings |= {role: names[0] for role, names in found.items() if names}
        (to / "tokenizer_config.json").write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))
    return []


def _inputs(spec: ModelSpec) -> list[str]:
    """Return the names of the model's inputs from the tokenizer. Their default differs between versions of transformers."""
    return ["input_ids", *(["token_type_ids"] if spec.type_vocab_size is not None else []), "attention_mask"]


def _bytes_as_bpe() -> str:
    """Return the byte tokenizer as a tokenizer.json: ids 0..255 are the bytes, and 256 ends a document."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers

    engine = Engine(models.BPE(vocab={_letter(byte): byte for byte in range(256)} | {EOD_NAMES[0]: 256}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([EOD_NAMES[0]])
    return str(engine.to_str(pretty=True))


def _letter(byte: int) -> str:
    """Return the character for a byte in byte-level BPE: the byte itself if it is printable, else a character from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))

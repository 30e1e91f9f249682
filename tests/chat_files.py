"""A chat model's tokenizer, and conversations in the forms that data sets have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from argosy.data.text.tokenizer import train_bpe

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same text, with the assistant's turns marked.
MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Keeps the reasoning of the last turn only.
REWRITES = CHATML.replace(
    "message.content", "(message.content if loop.last else message.content.split('</think>')[-1])"
)
TALK = [
    ("What is the capital of France?", "Paris."),
    ("And of Italy?", "Rome, the eternal city 🏛."),
    ("Say nothing", "No"),
    ("Count to five\nin one line", "1 2 3 4 5"),
]


def messages(first: int, turns: int) -> list[dict[str, Any]]:
    talk = [TALK[(first + turn) % len(TALK)] for turn in range(turns)]
    return [
        {"role": role, "content": text} for pair in talk for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def write_tokenizer(directory: Path, template: str = CHATML) -> Path:
    """Write a byte-level BPE with the special tokens of ChatML, as a chat model's directory has it."""
    document = json.loads(train_bpe([text for pair in TALK for text in pair] * 4, 300))
    first = 1 + max(document["model"]["vocab"].values())
    for number, name in enumerate(("<|im_start|>", "<|im_end|>")):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        document["added_tokens"].append({"id": first + number, "content": name, "special": True, **flags})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(document))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_chats(path: Path, count: int = 12) -> Path:
    """Write conversations of one to four turns in three forms."""
    lines: list[dict[str, Any]] = []
    for number in range(count):
        said = messages(number, 1 + number % 4)
        if number % 3 == 0:
            lines.append({"messages": [{"role": "system", "content": "Be brief."}, *said]})
        elif number % 3 == 1:
            named = {"user": "human", "assistant": "gpt"}
            lines.append({"conversations": [{"from": named[m["role"]], "value": m["content"]} for m in said]})
        else:
            lines.append({"instruction": said[0]["content"], "input": "", "output": said[1]["content"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

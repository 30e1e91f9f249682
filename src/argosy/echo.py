"""What a message may repeat of a user's values: no secrets, and never more than a screen.

A value can be a whole file by mistake, or hold a password. Everything that is shown, logged or stored about a value passes through
here: `redact` cuts out what lets its reader in somewhere, `capped` shortens in the middle and says by how much.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

CUT: Final = "***"  # stands in place of a secret
VALUE_LIMIT: Final = 120  # characters of a value that stands by itself
_WORD, _LINE, _TEXT, _LINES = 400, 1200, 6000, 60  # characters without a space, of a line, of all; lines

_TOKENS: Final = (
    # Not inside a word: a name such as task-specific-… holds "sk-".
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,}|xox[abpr]-[\w-]{10,})"
)
_PRIVATE_KEY: Final = r"()-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*?(?:-----END [A-Z ]*KEY-----|\Z)"
# A webhook's whole path is the secret: whoever has it can post.
_HOOKS: Final = r"(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|(?<![\w-])[\w-]{1,63}\.webhook\.office\.com|chat\.googleapis\.com)/"
_NAMES: Final = r"TOKEN|SECRET|PASSW(?:OR)?D?|API_?KEY|ACCESS_KEY|CREDENTIALS?|ACCOUNT_?KEY|SAS"
_SECRET_NAME: Final = re.compile(_NAMES, re.IGNORECASE)
_HARMLESS_NAMES: Final = {"TOKENIZERS_PARALLELISM"}
# Each with the part before the secret as its first group. First those of addresses, then those of any text.
_IN_ADDRESSES: Final = [
    re.compile(pattern, flags)
    for pattern, flags in (
        (rf"({_HOOKS})[^\s'\"<>]+", 0),
        # Up to the last @ before the path: a password may hold one itself. Without a colon it may be a container (abfs://box@account).
        (r"(://)[^/\s'\"@:]*:[^/\s'\"]+(?=@)", 0),
        (r"(https?://)[^/\s'\"]+(?=@)", re.I),
        (r"([?&;](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|[\w-]{0,40}(?:token|secret|password|key))=)[^&\s'\"]+", re.I),
        (r"(AccountKey=|SharedAccessSignature=)[^;\s'\"]+", re.I),
    )
]  # fmt: skip
_SECRETS: Final = _IN_ADDRESSES + [
    re.compile(pattern)
    for pattern in (
        _PRIVATE_KEY,
        rf"()(?:{_TOKENS})[A-Za-z0-9_-]*",
        # As a shell sets it; a reference to another variable or to a Kubernetes Secret is none.
        rf"((?<![\w./])(?!TOKENIZERS_PARALLELISM)\w{{0,60}}(?:{_NAMES})\w{{0,60}}=['\"]?)(?![\s$`])[^\s'\"&;]+",
    )
]  # fmt: skip


def redact(text: str) -> str:
    """The text with `***` in place of what looks like a token, password or signature."""
    return _cut(text, _SECRETS)


def redact_address(text: str) -> str:
    """A path, name or URL with `***` in place of the passwords and signatures that only URLs have."""
    return _cut(text, _IN_ADDRESSES)


def _cut(text: str, patterns: list[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(rf"\g<1>{CUT}", text)
    return text


def looks_secret(text: str) -> bool:
    """True if the text holds what `redact` would cut out. What was cut out before is no secret."""
    return redact(text) != text


def names_secret(variable: str) -> bool:
    """True if an environment variable of this name is expected to hold a secret."""
    return _SECRET_NAME.search(variable) is not None and variable not in _HARMLESS_NAMES


def address_only(url: str) -> str:
    """A URL whose path or query is a secret as a whole: its server alone. `env:NAME` is no secret."""
    if url.startswith("env:"):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{CUT}" if parts.hostname else CUT


def shorten(text: str, limit: int) -> str:
    """At most about `limit` characters: the middle is left out, and its length is said."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}… {len(text) - head - tail:,} characters left out …{text[len(text) - tail :]}"


def capped(text: str) -> str:
    """A message that may repeat any value: without secrets, and with long words, long lines and many lines shortened."""
    # Before anything is shortened: half of a secret no longer looks like one.
    text = redact(text[: 1 << 20])
    if len(text) > _WORD:
        text = re.sub(rf"\S{{{_WORD + 1},}}", lambda word: shorten(word[0], _WORD), text)
        lines = [shorten(line, _LINE) for line in text.split("\n")]
        if len(lines) > _LINES:
            kept = _LINES // 2
            lines = [*lines[:kept], f"… {len(lines) - 2 * kept:,} lines left out …", *lines[-kept:]]
        text = shorten("\n".join(lines), _TEXT)
    return text

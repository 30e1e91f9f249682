"""Redact and truncate user values before they are shown, logged or stored.

A value can be a whole file by mistake, or hold a password. Every message that repeats a value passes through this module:
`redact` replaces secrets by `***`, and `capped` also cuts the middle out of long text and says how much is missing.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

# The replacement for a secret.
CUT: Final = "***"
# The longest single value that is shown.
VALUE_LIMIT: Final = 120  # characters
# Limits of a message: characters per word, per line and in all, and number of lines.
_WORD, _LINE, _TEXT, _LINES = 400, 1200, 6000, 60

_TOKENS: Final = (
    # Only at the start of a word: a name such as task-specific-… contains "sk-".
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,}|xox[abpr]-[\w-]{10,})"
)
_PRIVATE_KEY: Final = r"()-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*?(?:-----END [A-Z ]*KEY-----|\Z)"
# The whole path of a webhook URL is a secret: whoever knows the path can post.
_HOOKS: Final = r"(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|(?<![\w-])[\w-]{1,63}\.webhook\.office\.com|chat\.googleapis\.com)/"
_NAMES: Final = r"TOKEN|SECRET|PASSW(?:OR)?D?|API_?KEY|ACCESS_KEY|CREDENTIALS?|ACCOUNT_?KEY|SAS"
_SECRET_NAME: Final = re.compile(_NAMES, re.IGNORECASE)
_HARMLESS_NAMES: Final = {"TOKENIZERS_PARALLELISM"}
# Group 1 of each pattern is the text before the secret. These patterns apply to URLs; `_SECRETS` adds those for any text.
_IN_ADDRESSES: Final = [
    re.compile(pattern, flags)
    for pattern, flags in (
        (rf"({_HOOKS})[^\s'\"<>]+", 0),
        # Match up to the last @ before the path, because a password may contain an @. Without a colon the part before the @ may be
        # a container name (abfs://box@account).
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
        # A shell assignment. A reference to another variable or to a Kubernetes Secret is not a secret.
        rf"((?<![\w./])(?!TOKENIZERS_PARALLELISM)\w{{0,60}}(?:{_NAMES})\w{{0,60}}=['\"]?)(?![\s$`])[^\s'\"&;]+",
    )
]  # fmt: skip


def redact(text: str) -> str:
    """Return the text with `***` in place of everything that looks like a token, password or signature."""
    return _cut(text, _SECRETS)


def redact_address(text: str) -> str:
    """Return a path, name or URL with `***` in place of the passwords and signatures that occur in URLs only."""
    return _cut(text, _IN_ADDRESSES)


def _cut(text: str, patterns: list[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(rf"\g<1>{CUT}", text)
    return text


def looks_secret(text: str) -> bool:
    """Return True if `redact` would change the text. An already redacted `***` does not count."""
    return redact(text) != text


def names_secret(variable: str) -> bool:
    """Return True if an environment variable of this name is expected to hold a secret."""
    return _SECRET_NAME.search(variable) is not None and variable not in _HARMLESS_NAMES


def address_only(url: str) -> str:
    """Return only scheme and host of a URL whose path or query is a secret. `env:NAME` is returned as it is."""
    if url.startswith("env:"):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{CUT}" if parts.hostname else CUT


def shorten(text: str, limit: int) -> str:
    """Truncate to about `limit` characters: replace the middle by a note with the number of characters left out."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}… {len(text) - head - tail:,} characters left out …{text[len(text) - tail :]}"


def capped(text: str) -> str:
    """Return a message that is safe to show: secrets redacted, and long words, long lines and many lines truncated."""
    # Redact before truncating: half of a secret no longer matches a pattern.
    text = redact(text[: 1 << 20])
    if len(text) > _WORD:
        text = re.sub(rf"\S{{{_WORD + 1},}}", lambda word: shorten(word[0], _WORD), text)
        lines = [shorten(line, _LINE) for line in text.split("\n")]
        if len(lines) > _LINES:
            kept = _LINES // 2
            lines = [*lines[:kept], f"… {len(lines) - 2 * kept:,} lines left out …", *lines[-kept:]]
        text = shorten("\n".join(lines), _TEXT)
    return text

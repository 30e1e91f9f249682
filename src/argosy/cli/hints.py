"""Hints for wrong command lines: verbs and options as other programs have them, and where ours are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Verbs of other programs, and verbs of ours that live in a group.
_OTHER_VERBS = {
    "generate": "sample",
    "chat": "sample",
    "evaluate": "eval",
    "pretrain": "train",
    "resume": "train",
    "finetune": "train",
    "tokenize": "data prepare",
    "preprocess": "data prepare",
    "dashboard": "dash",
    "benchmark": "bench",
    "runs": "ls",
    "list": "ls",
    "new": "init",
    "submit": "launch",
}


def verb_hint(word: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """Return the command that an unknown verb means, or None. `groups` maps a group of commands to the commands in it."""
    inside = [f"{group} {word}" for group, verbs in groups.items() if word in verbs]
    found = [_OTHER_VERBS[word]] if word in _OTHER_VERBS else inside
    return f"Did you mean {' or '.join(f'`argosy {one}`' for one in found)}?" if found else None


def option_hint(verb: str, option: str, arguments: Sequence[str]) -> str | None:
    """Return the override that an unknown option of a verb with overrides means, as `optim.lr=3` for `--lr 3`, or None."""
    from argosy.config.other_names import OTHER_NAMES
    from argosy.config.refusals import key_elsewhere

    name = option.lstrip("-").replace("-", "_").lower()
    keys = [OTHER_NAMES[name]] if name in OTHER_NAMES else key_elsewhere(name)
    if not keys:
        return None
    held = [key.partition(".")[2] for key in keys if key.startswith("parallel.")]
    if verb == "plan" and held:
        return f"A layout is held by --what-if {held[0]}={_value(option, arguments)}"
    return f"Keys of the run spec are given without dashes: {' or '.join(f'{key}={_value(option, arguments)}' for key in keys)}"


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value that the command line gives an option."""
    for here, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if here.startswith(f"{option}="):
            return here.partition("=")[2]
        if here == option and following and not following.startswith("-"):
            return following
    return "VALUE"

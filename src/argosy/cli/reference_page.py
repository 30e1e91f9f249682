"""The reference page of the command line: every command with its arguments and options, in Markdown, read from the program itself.

`python -m argosy.cli.reference_page` prints docs/cli.md. Commands are grouped by the user's journey.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from argosy.cli.app import GROUPS, app, argument_usage


def commands(group: Any = None, prefix: str = "argosy") -> Iterator[tuple[str, Any]]:
    """Yield the whole name and the object of every command that does something, subcommands included."""
    root: Any = group or get_command(app)
    for name, command in root.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def reference_page() -> str:
    """Return the text of docs/cli.md."""
    known = dict(commands())
    parts = {title: [name for name in known if name.split()[1] in verbs] for title, verbs in GROUPS.items()}
    lines = [
        "# The command line",
        "",
        "<!-- Made from src/argosy/cli by `make docs`; edit the help texts there. -->",
        "",
        "Any key of [the run spec](run-spec.md) can be overridden behind its file, as `argosy train run.yaml optim.lr=5e-4`. "
        "Commands that report take `--json`, and those that write take `--dry-run`. `argosy --debug COMMAND` adds the "
        "traceback to a refusal. [Exit codes](errors.md#exit-codes) tell a refusal from an interruption.",
    ]
    for title, names in parts.items():
        lines += ["", f"## {title}", "", "| command | what it does |", "| --- | --- |"]
        lines += [f"| [`{name}`](#{_anchor(name)}) | {_cell(_summary(known[name]))} |" for name in names]
        for name in names:
            lines += _section(name, known[name])
    return "\n".join(lines) + "\n"


def _section(name: str, command: Any) -> list[str]:
    shown = [parameter for parameter in command.params if not parameter.hidden and parameter.name != "help"]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option"]
    usage = " ".join([name, *(argument_usage(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
    lines = ["", f"### {name}", "", f"`{usage}`", "", _prose(command.help or "")]
    if shown:
        lines += ["", "| argument or option | meaning | default |", "| --- | --- | --- |"]
        lines += [f"| `{_cell(argument_usage(argument))}` | {_cell(argument.help or '')} | |" for argument in arguments]
        lines += [f"| {_names(option)} | {_cell(option.help or '')} | {_default(option)} |" for option in options]
    return lines


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _summary(command: Any) -> str:
    """Return the first paragraph of a command's help on one line."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).replace("<", "&lt;")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "(required)"
    if value is None or value == [] or (option.is_flag and not value):
        return ""
    if option.is_flag:
        return f"`{option.opts[0]}`"
    return ", ".join(f"`{item}`" for item in (value if isinstance(value, list | tuple) else [value]))


if __name__ == "__main__":
    sys.stdout.write(reference_page())

"""The `argosy` program: its commands, and its exit codes.

A refusal is a short block on standard error and exit code 2. With `--json` it is also an object on standard output; `--debug` shows
the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from argosy import __version__
from argosy.cli import (
    bench,
    checkpoint,
    config,
    dash,
    data,
    demo,
    doctor,
    evaluate,
    init,
    jobs,
    launch,
    note,
    plan,
    sample,
    sweep,
    train,
    watch,
)  # fmt: skip
from argosy.cli.hints import option_hint, verb_hint
from argosy.echo import capped
from argosy.errors import ArgosyError
from argosy.files import write_fix
from argosy.log_handler import install_log_handler

# The base class of BadParameter: click's, or that of the copy of click in newer versions of Typer.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


# Columns of a verb's name, and of its summary, in `--help`.
_NAME_WIDTH, _SUMMARY = 8, 66


def argument_usage(argument: Any) -> str:
    """Return an argument as usage lines and the reference page write it."""
    name: str = argument.metavar or argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required or name.startswith("[") else f"[{name}]"


class Verb(TyperCommand):
    """A command whose usage line has its arguments as they are written, without more brackets around them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(argument_usage, arguments)]


class Verbs(TyperGroup):
    """Runs a command, and converts expected failures (closed pipe, I/O, out of memory, Ctrl-C) to refusals or exit codes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _short_usage_errors():
            return super().make_context(*args, **kwargs)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs in `--help` by group."""
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                # All groups have their summaries in one column.
                rows = [
                    (name.ljust(_NAME_WIDTH), self.commands[name].get_short_help_str(limit=_SUMMARY)) for name in verbs
                ]
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _USAGE_ERROR as error:
            groups = {name: list(verb.commands) for name, verb in self.commands.items() if hasattr(verb, "commands")}
            if (hint := verb_hint(args[0], groups)) is not None:
                error.message = f"No such command {args[0]!r}. {hint}"
            raise

    def invoke(self, ctx: Any) -> Any:
        with _short_usage_errors():
            return self._invoke(ctx)

    def _invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader of our output closed the pipe, as `head` does.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            cause = f"{where}{error.strerror or error}"
            fix = write_fix(error, "check the path, its permissions and free space")
            raise ArgosyError("io.failed", cause, fix=fix) from error
        except UnicodeEncodeError as error:
            # A file name or an argument is not UTF-8 text.
            cause = f"{error.object[:80]!a} cannot be written in {error.encoding}: {error.reason}"
            raise ArgosyError(
                "config.bad-value", cause, fix="use UTF-8 text; in a POSIX locale, set PYTHONUTF8=1"
            ) from error
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            raise ArgosyError(
                "device.out-of-memory",
                str(error).partition("\n")[0] or "the process could not allocate more memory",
                fix="use less memory: a smaller parallel.micro_batch, parallel.recompute=selective or full; `argosy plan` shows "
                "what uses the memory",
            ) from error
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def _short_usage_errors() -> Iterator[None]:
    """Shorten usage errors, which repeat a wrong argument whole, however long it is. Say what is missing is for, and which key a
    wrong option means."""
    try:
        yield
    except _USAGE_ERROR as error:
        error.message = capped(error.message or getattr(getattr(error, "param", None), "help", None) or "")
        # Long options of a program begin alike, and --help is never what was meant.
        error.possibilities = [name for name in getattr(error, "possibilities", None) or () if name != "--help"]
        option: str | None = getattr(error, "option_name", None)
        command: Any = getattr(error.ctx, "command", None)
        takes_keys = any("KEY=VALUE" in str(p.metavar) for p in getattr(command, "params", ()))
        if option is not None and takes_keys and (hint := option_hint(str(command.name), option, sys.argv)) is not None:
            error.message, error.possibilities = f"{error.message}. {capped(hint)}", []
        raise


def ran_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error. Torch's errors are recognised by their text, so that torch need not be imported."""
    words = str(error)
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in words or "out of memory" in words


app = typer.Typer(
    cls=Verbs,
    name="argosy",
    help="From raw text to a trained language model: prepare the data, plan, train, evaluate, sample.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"argosy {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of a refusal."),
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None: ...


# The verbs of each part of the journey, in the order of `--help`.
GROUPS: dict[str, dict[str, Any]] = {
    "Start": {"demo": demo.demo, "init": init.init},
    "Data and configuration": {"data": data.app, "config": config.app},
    "Plan and measure": {"plan": plan.plan, "bench": bench.bench},
    "Train": {"train": train.train, "sweep": sweep.sweep},
    "Launch": {"launch": launch.launch, "status": jobs.status, "logs": jobs.logs, "stop": jobs.stop, "cp": jobs.cp},
    "Watch": {
        "ls": jobs.ls, "watch": watch.watch, "dash": dash.dash, "report": watch.report, "note": note.note,
        "doctor": doctor.doctor,
    },
    "Use the model": {"sample": sample.sample, "eval": evaluate.evaluate, "ckpt": checkpoint.app},
}  # fmt: skip
for _verbs in GROUPS.values():
    for _name, _verb in _verbs.items():
        if isinstance(_verb, typer.Typer):
            for _inner in _verb.registered_commands:
                _inner.cls = Verb
            app.add_typer(_verb, name=_name)
        else:
            app.command(_name, cls=Verb)(_verb)


def main() -> None:
    # Torch reads this when it is imported. Expandable segments reduce fragmentation of GPU memory.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Torch's profiler otherwise prints its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    _fill_standard_streams()
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        # A terminal may lack our characters, and a file name may not be text.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    install_log_handler()
    try:
        # `python -m argosy` has the same name, which completion scripts and examples use.
        app(prog_name="argosy")
    except ArgosyError as error:
        _refuse(error)


def _fill_standard_streams() -> None:
    """Open standard streams that were closed at the start, so that the next file opened does not get their descriptor."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _refuse(error: ArgosyError) -> None:
    if "--json" in sys.argv:
        import json

        print(json.dumps({"error": error.as_dict()}))
    if "--debug" in sys.argv:
        import traceback

        traceback.print_exception(error)
    else:
        print(error, file=sys.stderr)
    sys.exit(error.exit_code)

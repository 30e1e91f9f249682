"""Arguments that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.errors import ArgosyError

if TYPE_CHECKING:
    from argosy.supervise.world import World

Best = Annotated[
    bool, typer.Option("--best", help="Take the checkpoint with the lowest validation loss, which RUN/best names too.")
]
MODEL_HELP = "A run (runs/<name>), its best checkpoint (runs/<name>/best) or any other, an imported model, or hf:DIR."
RUN_METAVAR = "[RUN.yaml] [KEY=VALUE]..."
RUN_HELP = "The run spec (default: ./run.yaml), then any number of key.path=value overrides."


def run_and_overrides(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Split `[RUN.yaml] [key=value ...]`. The first argument is a file unless it is an override."""
    rest = list(arguments or [])
    if rest and ("=" not in rest[0] or Path(rest[0]).is_file()):
        return Path(rest.pop(0)), rest
    default = Path("run.yaml")
    return (default if default.exists() else None), rest


def new_output(ctx: typer.Context, value: Path | None) -> Path | None:
    """Take a local path to write, and say in the end which directories above it were made (a typer callback)."""
    if isinstance(local(value), Path) and value is not None:
        missing = [parent for parent in value.parents if not parent.exists()]
        if missing:
            ctx.call_on_close(lambda: _say_made(missing[-1]))
    return value


def _say_made(directory: Path) -> None:
    if directory.is_dir():
        print(f"made the directory {directory}, which was not there", file=sys.stderr)


def local(value: Path | list[Path] | None) -> Path | list[Path] | None:
    """Refuse a URL where a local path is needed, instead of using it as a directory name (a typer callback)."""
    from argosy.files import local_path

    if isinstance(value, Path):
        return local_path(value)
    return value and [local_path(path) for path in value]


def at_best(run: str, best: bool) -> str:
    """Return the best checkpoint of a run if it is asked for, else the run."""
    return f"{run.rstrip('/')}/best" if best else run


def require_run(path: Path | None, verb: str = "train") -> Path:
    if path is None:
        raise ArgosyError(
            "config.not-found",
            "no run spec is given, and there is no run.yaml in this directory",
            fix=f"argosy {verb} RUN.yaml [key.path=value …]; `argosy init CORPUS` writes a run.yaml",
        )
    return path


def require_writable(path: Path) -> None:
    """Raise an OSError if a file cannot be written, before the work whose result goes there."""
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def on_every_rank(nproc: int) -> int:
    """Run this command without `--nproc` in `nproc` processes on each node of the job, without restarts. Returns the exit code."""
    import tempfile

    from argosy.config.survival import FaultSpec
    from argosy.record.rundir import RunDir
    from argosy.supervise.agent import start_ranks
    from argosy.supervise.world import find_nodes

    words = without_option(sys.argv[1:], "--nproc")
    with tempfile.TemporaryDirectory(prefix="argosy-command-") as nowhere:
        return start_ranks(nproc, find_nodes(os.environ), words, RunDir(Path(nowhere) / "run"), FaultSpec(restarts=0))


def alone_or_on_ranks(work: Callable[[World | None], int], nproc: int | None) -> int:
    """Do the work of a command in this process, or with `--nproc` in several. Returns the exit code.

    `work` gets None where the process is alone, else the rank that `--nproc` has started it as.
    """
    from argosy.supervise.rank_process import RankFiles, run_as_rank
    from argosy.supervise.world import find_world

    if nproc is not None and nproc > 1:
        return on_every_rank(nproc)
    if RankFiles.of(os.environ) is None:
        return work(None)
    world = find_world(os.environ)
    return run_as_rank(lambda: work(world), world.rank)


def layout_keys(given: str | None, world: World | None) -> list[str]:
    """Return the keys of `--layout`. Raise ArgosyError if there are any and the process is alone."""
    if world is None and given is not None:
        raise ArgosyError(
            "config.conflict",
            "a layout is for several ranks, and this is one process",
            key="--layout",
            value=given,
            fix="add --nproc with the number of ranks of the layout",
        )
    return split_list(given)


def split_list(given: str | None) -> list[str]:
    """Return the parts of an option's value between commas."""
    return [part.strip() for part in (given or "").split(",") if part.strip()]


def without_option(arguments: list[str], name: str) -> list[str]:
    """Return a command line without one option and its value."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith(f"{name}="):
            skip = False
        elif argument == name:
            skip = True
        else:
            kept.append(argument)
    return kept

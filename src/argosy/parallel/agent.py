"""Several ranks on this machine, started and watched by torch's elastic agent: `argosy train --nproc 4`.

The ranks run the same command without `--nproc`, and find their place in the environment. A directory both sides know of
carries what exit codes cannot: the ranks' process ids, so that Ctrl-C and SIGTERM reach them and they have all the time they
need to save; the reason a rank failed, so that the first is told once; and the code of an orderly end, which the agent would
take for a failure.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from argosy.errors import EXIT_BUG, EXIT_DONE, EXIT_REFUSED, ArgosyError
from argosy.parallel.ranks import Nodes

_DIRECTORY = "ARGOSY_RANKS"  # in the environment of a rank: where it leaves what the starter must know
_PORT_WAIT_S = 900


def start_ranks(nproc: int, nodes: Nodes, arguments: Sequence[str]) -> int:
    """Run `argosy` with these arguments in `nproc` processes on this node. Returns the exit code of them all."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what there is to say is said below
    alone = nodes.count == 1
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex if alone else "argosy",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else f"{nodes.address}:{nodes.port}",
        rdzv_configs={"timeout": _PORT_WAIT_S} | ({} if alone else {"rank": nodes.index}),
        local_addr="localhost" if alone else None,
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # Ctrl-C and SIGTERM are ours
    )
    with tempfile.TemporaryDirectory(prefix="argosy-ranks-") as directory:
        os.environ[_DIRECTORY] = directory
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
        restore = _forward_signals(Path(directory))
        try:
            elastic_launch(config, sys.executable)("-m", "argosy", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _tell_first(Path(directory), rank, failure.exitcode)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            restore()
            del os.environ[_DIRECTORY]
        codes = [int(file.read_text()) for file in Path(directory).glob("*.exit")]
        return max(codes, default=EXIT_DONE)


def run_as_rank(function: Callable[[], int], rank: int) -> int:
    """Run this process's part. Where it was started by `start_ranks`, its end is left for that to tell."""
    directory = os.environ.get(_DIRECTORY)
    if directory is None:
        return function()
    _write(Path(directory) / f"{rank}.pid", str(os.getpid()))
    try:
        code = function()
    except ArgosyError as error:
        _write(Path(directory) / f"{rank}.error", str(error))
        return EXIT_REFUSED
    except Exception:  # noqa: BLE001 - told by the starter, once for all ranks
        _write(Path(directory) / f"{rank}.error", traceback.format_exc())
        return EXIT_BUG
    _write(Path(directory) / f"{rank}.exit", str(code))
    return EXIT_DONE


def _forward_signals(directory: Path) -> Callable[[], None]:
    def forward(number: int, frame: FrameType | None) -> None:
        ranks = [int(file.read_text()) for file in directory.glob("*.pid")]
        if not ranks:
            raise KeyboardInterrupt  # none has begun: the agent ends them
        for rank in ranks:
            try:
                os.kill(rank, number)
            except ProcessLookupError:
                continue  # it has ended already

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore


def _tell_first(directory: Path, rank: int, exitcode: int) -> int:
    """Say why the first rank that failed did: the others followed it."""
    errors = sorted(directory.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    if errors:
        first = errors[0]
        print(f"rank {first.stem}: {first.read_text().rstrip()}", file=sys.stderr)
        return EXIT_REFUSED if not first.read_text().startswith("Traceback") else EXIT_BUG
    if exitcode < 0:
        print(f"rank {rank} was ended by {signal.Signals(-exitcode).name}", file=sys.stderr)
        return 128 - exitcode
    print(f"rank {rank} ended with exit code {exitcode}; what it said is above", file=sys.stderr)
    return exitcode


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f"{path.suffix}-partial")
    partial.write_text(text)
    partial.rename(path)

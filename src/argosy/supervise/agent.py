"""The launcher of ranks on one machine, `argosy train --nproc 4`: torch's elastic agent starts them, a supervisor watches them.

The ranks run the same command without `--nproc` and find their rank in the environment. On several nodes, the agents
rendezvous at the address of node 0. When one agent restarts its ranks, all do; they wait for a node that was lost.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from argosy.config.survival import FaultSpec
from argosy.errors import EXIT_DONE, EXIT_RESUMABLE
from argosy.host_cores import available_cores
from argosy.record.rundir import RunDir
from argosy.supervise.rank_process import RankFiles
from argosy.supervise.supervisor import Supervisor
from argosy.supervise.world import Nodes

if TYPE_CHECKING:
    from argosy.supervise.node_rendezvous import Place

# Signals forwarded to the ranks, which then stop in order.
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_log = logging.getLogger(__name__)
# Seconds between two tries of a failed rendezvous.
_RETRY_S = 2.0


def start_ranks(nproc: int, nodes: Nodes, arguments: Sequence[str], run: RunDir, fault: FaultSpec) -> int:
    """Run `argosy` with these arguments in `nproc` processes on this node. Returns the exit code of the job."""
    _load_quietly()
    from argosy.compat import FLIGHT_RECORD

    # The supervisor reports failures.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    # Ctrl-C and SIGTERM are handled here.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for name, value in FLIGHT_RECORD.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="argosy-ranks-") as scratch:
        supervisor = Supervisor(Path(scratch), run, fault)
        supervisor.begin()
        _take_signals(supervisor)
        try:
            return _run_agents(nproc, nodes, arguments, supervisor)
        except KeyboardInterrupt:
            return supervisor.stopped_between()
        finally:
            # A signal during exit does not change the exit code.
            supervisor.ended = True
            for number in _FORWARDED:
                signal.signal(number, signal.SIG_IGN)
            RankFiles.forget()


def _load_quietly() -> None:
    """Import torch without its warnings about lost peers, which come with a page of native stack. Ranks keep theirs."""
    given = os.environ.get("TORCH_CPP_LOG_LEVEL")
    # torch reads this once, while it loads.
    os.environ["TORCH_CPP_LOG_LEVEL"] = given or "ERROR"
    import torch.distributed  # noqa: F401

    if given is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]


def _run_agents(nproc: int, nodes: Nodes, arguments: Sequence[str], supervisor: Supervisor) -> int:
    """Run an agent, and a new one whenever the nodes have lost each other."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from argosy.supervise.node_rendezvous import Place, PlaceTakenError

    lost_at = time.monotonic()
    place = Place()
    while True:
        try:
            failed = _run_agent(nproc, nodes, arguments, supervisor, place)
        except PlaceTakenError as error:
            _log.error(
                "%s, so this one ends: a node that is started again takes the place of the one before. If this one was not, two nodes "
                "have the same index: NODE_RANK, or what the scheduler sets instead, must differ",
                error,
            )
            return EXIT_RESUMABLE
        except (RendezvousError, DistError) as error:
            if (code := supervisor.ended_elsewhere()) is not None:
                return code
            if supervisor.has_run:
                lost_at = time.monotonic()
            if supervisor.signals or time.monotonic() > lost_at + supervisor.spec.nodes_wait:
                _log.error("%s", _missing(nodes, supervisor.spec, error))
                return EXIT_RESUMABLE
            time.sleep(_RETRY_S)
            supervisor.begin_again()
            continue
        if failed and supervisor.failure is not None:
            return supervisor.failure.code
        return max(supervisor.files.exit_codes(), default=EXIT_DONE)


def _run_agent(nproc: int, nodes: Nodes, arguments: Sequence[str], supervisor: Supervisor, place: Place) -> bool:
    """Run one agent to its end. Returns whether it failed."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    from argosy.compat import elastic_agent
    from argosy.supervise.node_rendezvous import NodeRendezvous, PlaceTakenError, open_store

    wait_s = supervisor.spec.nodes_wait
    rendezvous = NodeRendezvous(open_store(nodes, max(1.0, min(60.0, wait_s))), nodes, max(1.0, wait_s), place)
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-m", "argosy", *arguments),
        rdzv_handler=rendezvous,
        # The supervisor counts restarts.
        max_restarts=1,
        monitor_interval=0.1,
    )
    logs = DefaultLogsSpecs(log_dir=str(supervisor.scratch / "torch"))
    try:
        result = elastic_agent(spec, logs, supervisor).run()
    except (RendezvousClosedError, PlaceTakenError):
        # Another node has ended the job, and to say so again could end the next one; or the job goes on without this agent.
        raise
    except BaseException:
        rendezvous.shutdown()
        raise
    rendezvous.shutdown()
    return result is not None and result.is_failed()


def _missing(nodes: Nodes, spec: FaultSpec, error: Exception) -> str:
    return (
        f"the {nodes.count} nodes did not find each other at {nodes.address}:{nodes.port} within {spec.nodes_wait:g}s "
        f"(fault.nodes_wait); this is node {nodes.index}, and "
        + ("at least one of the others is missing" if nodes.index == 0 else "node 0, where the others listen, may be")
        + f": {error}"
    )


def _take_signals(supervisor: Supervisor) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        supervisor.forward(number)

    for number in _FORWARDED:
        signal.signal(number, forward)

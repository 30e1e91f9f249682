"""A process finds its rank under any launcher, and says what is missing if it cannot."""

from __future__ import annotations

import pytest

from argosy.errors import ArgosyError
from argosy.supervise.world import Nodes, find_nodes, find_world, first_host

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip
INDEXED = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0.svc"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1, "localhost", 29500)),
        (TORCHRUN, (5, 1, 8, "h0", 1234)),
        (SLURM, (3, 1, 4, "gpu07", 20077)),
        (INDEXED, (2, 0, 4, "pod-0.svc", 29500)),
        # torchrun under srun: the innermost launcher decides.
        (SLURM | TORCHRUN, (5, 1, 8, "h0", 1234)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (0, 0, 1, "localhost", 29500)),
    ],
)
def test_the_first_launcher_in_the_documented_order_decides(
    environ: dict[str, str], expected: tuple[int, int, int, str, int]
) -> None:
    world = find_world(environ)
    assert (world.rank, world.local_rank, world.size, world.address, world.port) == expected


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (TORCHRUN | {"RANK": "8"}, ["RANK is 8", "WORLD_SIZE is 8"]),
        (TORCHRUN | {"WORLD_SIZE": "many"}, ["WORLD_SIZE is 'many'"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["2 ranks"]),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, ["2 ranks"]),
    ],
)
def test_half_an_environment_is_refused(environ: dict[str, str], names: list[str]) -> None:
    with pytest.raises(ArgosyError) as refusal:
        find_world(environ)
    assert refusal.value.code == "launch.environment"
    assert all(name in refusal.value.cause for name in names)


def test_nodes_for_those_who_start_ranks_themselves() -> None:
    assert find_nodes({}) == Nodes()
    kubeflow = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "5"}
    assert find_nodes(kubeflow | TORCHRUN) == Nodes(1, 2, "h0", 1234)
    assert find_nodes(kubeflow) == Nodes(1, 2, "m", 5)
    assert find_nodes({"SLURM_NODEID": "1", "SLURM_NNODES": "2"} | SLURM) == Nodes(1, 2, "gpu07", 20077)
    by_hand = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "h0"}
    assert find_nodes(by_hand) == Nodes(1, 2, "h0", 29500)


def test_a_node_that_does_not_know_its_index_starts_no_world_of_its_own() -> None:
    for environ, missing in (({"MASTER_ADDR": "h0"}, "NODE_RANK"), ({"NODE_RANK": "0"}, "MASTER_ADDR")):
        with pytest.raises(ArgosyError) as refusal:
            find_nodes({"NNODES": "2"} | environ)
        assert (refusal.value.code, refusal.value.key) == ("launch.environment", missing)
    assert find_nodes({"NNODES": "1"}) == Nodes()
    assert find_nodes({"NNODES": "2"} | TORCHRUN) == Nodes(), "torchrun has said which rank this is"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[07-09,12],x1", "gpu07"),
        ("r[1-2]n[3,5]", "r1n3"),
        ("rack-a[10]-eth,b", "rack-a10-eth"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host

"""The rank that others wait for is found from the collectives that the ranks have begun."""

from __future__ import annotations

from typing import Any

from argosy.supervise.evidence import Witness, find_culprit, find_mismatch, find_waited_for


def entry(
    group: str, number: int, name: str = "nccl:all_reduce", *, state: str = "completed", p2p: bool = False
) -> dict[str, Any]:
    seq = {"p2p_seq_id": number, "is_p2p": True} if p2p else {"collective_seq_id": number}
    return {"process_group": [group, group], "profiling_name": name, "state": state, **seq}


def witness(rank: int, *collectives: dict[str, Any], stack: str = "") -> Witness:
    return Witness(rank, "S", f"Thread 0x1 (most recent call first):\n{stack}", list(collectives))


def test_a_rank_that_waits_for_another_is_not_blamed_for_those_that_wait_for_it() -> None:
    """Rank 1 stopped before a collective of its tensor-parallel group, rank 0 waits for it there, and ranks 2 and 3 for both."""
    ranks = [
        witness(0, entry("tp0", 8), entry("dp0", 3)),
        witness(1, entry("tp0", 7), entry("dp1", 3)),
        witness(2, entry("tp1", 8), entry("dp0", 4)),
        witness(3, entry("tp1", 8), entry("dp1", 4)),
    ]
    rank, cause = find_culprit(ranks, {})
    assert rank == 1
    assert "waits in all_reduce, number 8 of tp0" in cause


def test_messages_between_stages_are_not_counted() -> None:
    ranks = [
        witness(0, entry("world", 5), *(entry("pp", n, "nccl:send", p2p=True) for n in range(9))),
        witness(1, entry("world", 4)),
    ]
    assert find_culprit(ranks, {})[0] == 1


def test_back_ends_of_one_group_count_for_themselves() -> None:
    ranks = [witness(rank, entry("0", 3, "gloo:all_reduce"), entry("0", 50)) for rank in (0, 1)]
    assert find_culprit(ranks, {0: 9, 1: 8}) == (1, "it has come least far")
    assert find_mismatch([witness(0, entry("0", 3, "gloo:all_reduce"), entry("0", 3, "nccl:broadcast"))]) is None


def test_after_a_timeout_the_rank_that_waits_in_no_collective_is_named() -> None:
    on_gpu = witness(1, entry("0", 5, state="started"))
    on_host = witness(2, entry("0", 5), stack='  File "distributed_c10d.py", line 1 in all_reduce')
    idle = witness(3, entry("0", 4), stack='  File "planted.py", line 1 in _sleep')
    assert find_waited_for([on_gpu, on_host, idle]) == 3
    assert find_waited_for([on_gpu, on_host]) is None

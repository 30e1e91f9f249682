"""Every fault that a CPU machine can show, injected for real, with its expected outcome.

`make faults` runs all of them and prints the cost of each; `make test` runs the short form. The numbers are those of
docs/guides/survival.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from faults import of_checkpoints, of_data, of_nodes, of_numbers, of_ranks, of_storage
from faults.bench import Bench, Outcome

FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    "1 SIGTERM": of_ranks.preempted,
    "1 SIGTERM twice": of_ranks.preempted_twice,
    "1 SIGTERM between two attempts": of_ranks.preempted_between,
    "2 SIGKILL to one rank": of_ranks.rank_killed,
    "2 SIGKILL to the supervisor": of_ranks.supervisor_killed,
    "2 the second node lost": of_nodes.second_node_lost,
    "2 the first node lost": of_nodes.first_node_lost,
    "3 SIGSTOP to one rank": of_ranks.rank_stopped,
    "3 one rank waits": of_ranks.one_rank_waits,
    "4 the GIL is held": of_ranks.gil_held,
    "5 an exception": of_ranks.exception,
    "5 a segmentation fault": of_ranks.crash,
    "5 the device is out of memory": of_ranks.device_out_of_memory,
    "6 a collective times out": of_ranks.collective_timeout,
    "6 a collective left out": of_ranks.mismatch,
    "7 killed while saving": of_checkpoints.killed_while_saving,
    "8 a byte flipped": of_checkpoints.flipped_byte,
    "9 a file is missing": of_checkpoints.missing_file,
    "9 the manifest is missing": of_checkpoints.missing_manifest,
    "10 disk full": of_storage.disk_full,
    "11 slow storage": of_storage.slow_storage,
    "11 a slow last save": of_storage.slow_last_save,
    "12 read-only": of_storage.read_only,
    "13 resumed in another layout": of_ranks.other_layout,
    "14 resumed three times": of_ranks.resumed_thrice,
    "15 the same crash at one step": of_ranks.same_step,
    "16 the last two are corrupt": of_checkpoints.two_corrupt,
    "16 all are corrupt": of_checkpoints.all_corrupt,
    "17 NaN": of_numbers.not_a_number,
    "18 a spike": of_numbers.spike,
    "19 a bit flips in a replica": of_numbers.flipped_bit,
    "20 a rank a fifth slower": of_ranks.rank_a_fifth_slower,
    "20 a rank a twentieth slower": of_ranks.rank_a_little_slower,
    "21 bad records": of_data.bad_records,
    "22 a token beyond the vocabulary": of_data.token_beyond_vocabulary,
    "22 another tokenizer": of_data.other_tokenizer,
    "23 a shard is cut short": of_data.truncated_shard,
    "23 a shard is damaged": of_data.damaged_shard,
    "23 the corpus was swapped": of_data.swapped_corpus,
    "24 a store that fails": of_data.failing_store,
    "25 a cache too small": of_data.cache_too_small,
    "26 left by the dead": of_storage.left_by_the_dead,
    "27 sinks are down": of_storage.sinks_down,
    "28 the clock jumps": of_storage.clock_jump,
    "29 a node is late": of_nodes.node_late,
    "29 a node never comes": of_nodes.node_absent,
    "30 another number of ranks": of_data.wrong_world_size,
    "30 a wrong environment": of_data.wrong_environment,
    "31 little shared memory": of_storage.little_shared_memory,
    "36 out of memory": of_ranks.out_of_memory,
    "37 another format version": of_checkpoints.other_version,
}
# The short form also has a short storm of SIGKILL.
SHORT = {"15 the same crash at one step", "17 NaN", "30 a wrong environment"}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_fault(bench: Bench, name: str) -> None:
    bench.record(name, FAULTS[name](bench))

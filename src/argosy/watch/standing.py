"""Findings from heartbeats: ranks that hang or are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.record.jsonl import Record
from argosy.record.rank_logs import last_words
from argosy.watch.finding import BESIDE, DEATH, STALL, Finding, name_ranks
from argosy.watch.run_list import Run, is_held

# Seconds in a phase before a rank counts as hanging: at least; the first time in a phase; the first time in the data phase.
_LEAST_S, _FIRST_S, _FIRST_DATA_S = 20.0, 300.0, 60.0
_MOST_LINES = 16
# An older heartbeat means that its writer is gone.
_STALE_S = 30.0


def ranks_now(run: Run) -> Iterator[Finding]:
    """Yield findings from heartbeats alone, for runs without a supervisor, and before the supervisor acts."""
    beats = run.heartbeats()
    if not beats:
        return
    dead = {rank: beat for rank, beat in beats.items() if beat.get("alive") is False and beat.get("phase") != "done"}
    held = is_held(run.root)
    kinds = [event.get("event") for event in run.events() if event.get("event") not in BESIDE]
    stopped = kinds and kinds[-1] in ("done", "interrupted", "non-finite", "failed", "skip", "rewind")
    if dead and not stopped:
        rank, beat = min(dead.items(), key=lambda item: item[1].get("time", 0.0))
        living = [r for r, b in beats.items() if r not in dead]
        rest = f"; {_waiting(living)} for it" if living and held else ""
        text = f"rank {rank} on {beat.get('host')} ended without a message at step {beat.get('step')} in {beat.get('phase')}: killed, or crashed{rest}"
        yield Finding(
            DEATH - 1,
            text,
            "look for the kernel's or Kubernetes' reason (dmesg, kubectl get events) and give it with --log; the same command goes on from the last checkpoint",
            [*_lines(beats, [rank]), *last_words(run.root, rank)],
            "rank-died",
        )
        return
    alive = {rank: beat for rank, beat in beats.items() if beat.get("alive")}
    silent = [rank for rank, beat in alive.items() if beat["age_s"] > _STALE_S + 20 * len(beats) / 64]
    heard = {rank: beat for rank, beat in alive.items() if rank not in silent}
    if silent and not stopped and (_still(run, heard) if heard else not held):
        yield _gone(beats, silent, list(heard))
        return
    yield from _hang(run, heard)


def _gone(beats: dict[int, Record], silent: list[int], waiting: list[int]) -> Finding:
    """Return the finding about ranks whose heartbeats have stopped, and the ranks that wait for them."""
    age = min(float(beats[rank]["age_s"]) for rank in silent)
    hosts = ", ".join(sorted({str(beats[rank].get("host")) for rank in silent})[:4])
    rest = f"; {_waiting(waiting)} for {'it' if len(silent) == 1 else 'them'}" if waiting else ""
    text = f"no heartbeat of {name_ranks(silent)} on {hosts} for {age:.0f} s: the machine is down, or its file system is{rest}"
    fix = f"check {hosts}; the same command goes on from the last checkpoint"
    return Finding(DEATH - 2, text, fix, _lines(beats, silent), "silent")


def _lines(beats: dict[int, Record], first: Sequence[int]) -> list[str]:
    """Return heartbeats as evidence: the ranks to blame first."""
    ordered = [*first, *(rank for rank in beats if rank not in first)]
    return [_describe(rank, beats[rank]) for rank in ordered[:_MOST_LINES]]


def _still(run: Run, beats: dict[int, Record]) -> dict[int, Record]:
    """Return the ranks that have been in a phase for too long."""
    usual = float(run.series.last.get("step_s") or 10.0)
    return {
        rank: beat
        for rank, beat in beats.items()
        if float(beat.get("phase_s", 0)) > _patience(beat, usual) and beat.get("phase") not in ("start", "load", "done")
    }


def _hang(run: Run, beats: dict[int, Record]) -> Iterator[Finding]:
    still = _still(run, beats)
    if not still:
        return
    stopped = [rank for rank, beat in still.items() if beat.get("state") in ("T", "t")]
    waiting = [rank for rank, beat in still.items() if beat.get("state") == "D"]
    culprit = (
        stopped or waiting or [min(still, key=lambda r: (still[r].get("progress", 0), still[r].get("phase") != "data"))]
    )[0]
    beat = still[culprit]
    why = (
        "its process is stopped (SIGSTOP, a debugger or a paused container)"
        if stopped
        else "it waits for a device or a file system that does not answer"
        if waiting
        else _DOING.get(str(beat.get("phase")), "it does not go on")
    )
    others = [rank for rank in still if rank != culprit]
    where = (
        f"{_waiting(others)} in {still[others[0]].get('phase')} for rank {culprit}, which"
        if others
        else f"rank {culprit}"
    )
    text = f"{where} has been in {beat.get('phase')} of step {beat.get('step')} for {beat.get('phase_s', 0):.0f} s on {beat.get('host')}: {why}"
    yield Finding(
        STALL - 1,
        text,
        f"py-spy dump --pid {beat.get('pid')} on {beat.get('host')} shows where; ending it restarts the run from its last checkpoint",
        _lines(beats, [culprit]),
        "hang",
    )


def _patience(beat: Record, usual: float) -> float:
    """Return the seconds that a rank may stay in its phase.

    The limit is 10 usual steps or 4 times the longest time in the phase. It is longer for a first time, since the first step
    compiles, and the first save and evaluation may be slow.
    """
    longest = beat.get("longest_s")
    if longest == 0 and beat.get("state") not in ("T", "t"):
        return max(_FIRST_DATA_S if beat.get("phase") == "data" else _FIRST_S, 10 * usual)
    return max(_LEAST_S, 10 * usual, 4 * float(longest or 0))


_DOING = {
    "data": "it is reading data, and the storage does not answer",
    "save": "it is writing a checkpoint, and the storage does not answer",
    "last_save": "it is writing its last checkpoint, and the storage does not answer",
    "evaluate": "it is evaluating",
    "write_samples": "it is writing samples of text",
    "score_tasks": "it is scoring tasks",
    "forward_backward": "it is in a forward or backward pass, or waits there for another rank",
    "optimizer": "it is in the optimiser, or waits there for another rank",
}


def _describe(rank: int, beat: Record) -> str:
    age = float(beat["age_s"])
    end = "" if beat.get("alive") else ", ended"
    return f"rank {rank} on {beat.get('host')}: step {beat.get('step')}, {beat.get('phase')} for {beat.get('phase_s', 0):.1f} s, process state {beat.get('state')}{end}, last heartbeat {age:.0f} s ago"


def _waiting(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} wait" + ("s" if len(ranks) == 1 else "")

"""Who stands still or is gone, by the heart beats of the ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from argosy.record.jsonl import Record
from argosy.watch.finding import BESIDE, DEATH, STALL, Finding, called
from argosy.watch.runs import Run, is_held

_STALE_S = 30.0  # a heart beat older than this was written by nobody


def ranks_now(run: Run) -> Iterator[Finding]:
    """Who stands still or is gone, by the heart beats alone: for runs without a supervisor, and while it still waits."""
    beats = run.heartbeats()
    if not beats:
        return
    dead = {rank: beat for rank, beat in beats.items() if beat.get("alive") is False and beat.get("phase") != "done"}
    held = is_held(run.root)
    said = [event.get("event") for event in run.events() if event.get("event") not in BESIDE]
    stopped = said and said[-1] in ("done", "interrupted", "non-finite", "failed", "skip", "rewind")
    lines = [_told(rank, beat) for rank, beat in list(beats.items())[:16]]
    if dead and not stopped:
        rank, beat = min(dead.items(), key=lambda item: item[1].get("time", 0.0))
        living = [r for r, b in beats.items() if r not in dead]
        rest = f"; {_waiting(living)} for it" if living and held else ""
        text = f"rank {rank} on {beat.get('host')} ended without a word at step {beat.get('step')} in {beat.get('phase')}: killed, or crashed{rest}"
        yield Finding(
            DEATH - 1,
            text,
            "look for the kernel's or Kubernetes' reason (dmesg, kubectl get events) and give it with --log; the same command goes on from the last checkpoint",
            lines,
            "rank-died",
        )
        return
    alive = {rank: beat for rank, beat in beats.items() if beat.get("alive")}
    silent = [
        rank
        for rank, beat in alive.items()
        if time.time() - float(beat.get("time", 0)) > _STALE_S + 20 * len(beats) / 64
    ]
    if silent and len(silent) == len(alive) and not held and not stopped:
        text = f"nobody has heard of {called(silent)} for {time.time() - max(float(alive[r]['time']) for r in silent):.0f} s: the machine went away, or the file system does"
        yield Finding(
            DEATH - 2, text, "check the node; the same command goes on from the last checkpoint", lines, "silent"
        )
        return
    yield from _hang(run, {r: b for r, b in alive.items() if r not in silent}, lines)


def _hang(run: Run, beats: dict[int, Record], lines: list[str]) -> Iterator[Finding]:
    usual = float(run.series.last.get("step_s") or 10.0)
    patience = max(20.0, 10 * usual)
    still = {
        rank: beat
        for rank, beat in beats.items()
        if float(beat.get("phase_s", 0)) > patience and beat.get("phase") not in ("start", "load", "done")
    }
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
        lines,
        "hang",
    )


_DOING = {
    "data": "it is reading data, and the storage does not answer",
    "save": "it is writing a checkpoint, and the storage does not answer",
    "last_save": "it is writing its last checkpoint, and the storage does not answer",
    "evaluate": "it is evaluating",
    "forward_backward": "it is in a forward or backward pass, or waits there for another rank",
    "optimizer": "it is in the optimiser, or waits there for another rank",
}


def _told(rank: int, beat: Record) -> str:
    age = time.time() - float(beat.get("time", 0))
    end = "" if beat.get("alive") else ", ended"
    return f"rank {rank} on {beat.get('host')}: step {beat.get('step')}, {beat.get('phase')} for {beat.get('phase_s', 0):.1f} s, process state {beat.get('state')}{end}, heard of {age:.0f} s ago"


def _waiting(ranks: Sequence[int]) -> str:
    return f"{called(ranks)} wait" + ("s" if len(ranks) == 1 else "")

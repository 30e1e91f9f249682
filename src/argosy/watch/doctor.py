"""What is wrong with a run: one verdict first, then the evidence. Reads the run directory, and log files it is given.

Findings come from what ranks say of themselves (heart beats), from the run's events and figures, and from what is known about
lines in logs. Each has a weight by how directly it explains that training does not go on; the heaviest is the verdict.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.record.jsonl import Record, read_metrics
from argosy.watch.knowledge import Match, matches
from argosy.watch.runs import Run, is_held

_LOG_BYTES = 2 << 20  # at the end of each log that are read
_FULL_BYTES = 16 << 20  # a file system with less is full
_RECENT_S = 3600.0
_STALE_S = 30.0  # a heart beat older than this was written by nobody

# Weights: how directly a finding explains that training does not go on.
WELL = 100  # nothing explains it better than that a run is done
STALL, FULL, DEATH, KNOWN, NUMBERS, FAILED, DISK, OVERFLOW, SLOW, WARNING, NOTE = (
    95,
    92,
    90,
    85,
    80,
    77,
    75,
    60,
    50,
    40,
    10,
)


@dataclass(frozen=True)
class Finding:
    weight: int
    verdict: str
    fix: str
    evidence: list[str] = field(default_factory=list)
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "verdict": self.verdict, "fix": self.fix, "evidence": self.evidence}


def diagnose(run: Run, logs: Sequence[Path] = ()) -> list[Finding]:
    """Everything found, the verdict first. Never empty."""
    run.series.update()
    found = [*_events(run), *_ranks_now(run), *_numbers(run), *_disk(run), *_slow(run), *_known(run, logs)]
    well = _well(run)
    if well.weight in (NOTE, WELL) or not any(
        finding.weight > well.weight for finding in found
    ):  # else it has been said why
        found.append(well)
    return sorted(found, key=lambda finding: -finding.weight)


def _well(run: Run) -> Finding:
    state, last = run.state(), run.series.last
    step = f"step {last.get('step')} of {last.get('steps')}" if last else "no step logged yet"
    text = {
        "done": f"nothing is wrong: the run is done, {step}",
        "running": f"nothing is wrong: the run is training, {step}",
        "stopped": f"nothing is wrong: the run was asked to stop, {step}",
        "new": "the run has not begun",
    }.get(state, f"the run ended without a word, at {step}: nothing here says why")
    fix = (
        ""
        if state != "dead"
        else "give the logs of its ranks or pods with --log; the same `argosy train` command goes on from the last checkpoint"
    )
    again = sum(event["event"] in ("resume", "rewind") for event in run.events())
    history = (
        f"; it went on from a checkpoint {again} time{'s' if again > 1 else ''}" if again and state != "dead" else ""
    )
    return Finding({"dead": WARNING - 5, "done": WELL}.get(state, NOTE), text + history, fix, name=state)


def _events(run: Run) -> Iterator[Finding]:
    """What the supervisor and the trainer wrote down, of the newest attempt."""
    events = run.events()
    starts = [i for i, event in enumerate(events) if event.get("event") in ("start", "resume")]
    newest = events[starts[-1] :] if starts else events
    up = {event.get("sink") for event in newest if event.get("event") == "sink-up"}
    yield from _skipped([event for event in newest if event.get("event") == "skip"], newest, run)
    for event in newest:
        kind, rank, cause = event.get("event"), event.get("rank"), str(event.get("cause", ""))
        evidence = [f"events.jsonl: {kind} at step {event.get('step')}", *_details(event)]
        if kind == "stall":
            text = f"rank {rank} stood still for {event.get('seconds', 0):.0f} s at step {event.get('step')} in {event.get('phase')}: {cause}"
            yield Finding(STALL, text, "its stacks and collectives are in debug/", evidence, "stall")
        elif kind == "rank-died":
            known = next(iter(matches([cause, *str(event.get("error") or "").splitlines()], "events.jsonl")), None)
            fix = (
                known.failure.fix
                if known
                else "the same command goes on from the last checkpoint; look at the rank's log"
            )
            yield Finding(
                DEATH,
                f"rank {rank} died at step {event.get('step')} in {event.get('phase')}: {cause}",
                fix,
                evidence,
                known.failure.name if known else "rank-died",
            )
        elif kind == "non-finite":
            text = f"at step {event.get('step')} the loss is {event.get('loss')} and the gradient norm {event.get('grad_norm')}"
            yield Finding(
                NUMBERS,
                text,
                "lower optim.lr or lengthen optim.warmup, and look at the samples of that step",
                evidence,
                "nan",
            )
        elif kind == "save-failed":
            text = f"the checkpoint of step {event.get('step')} could not be written: {event.get('cause') or event.get('text')}"
            yield Finding(
                DISK, text, "free some space, or move runs_dir; the older checkpoints are good", evidence, "save-failed"
            )
        elif kind == "failed":
            known = next(iter(matches(cause.splitlines(), "events.jsonl")), None)
            fix = event.get("fix") or (
                known.failure.fix if known else "the same command goes on from the last checkpoint"
            )
            text = f"rank {rank} ended at step {event.get('step')}: {known.failure.cause if known else cause}"
            evidence += [f"  {cause}"] if known else []
            yield Finding(
                FAILED, text, str(fix), evidence, known.failure.name if known else str(event.get("code", kind))
            )
        elif kind == "gave-up":
            yield Finding(
                DEATH + 3,
                f"the run was given up: {event.get('reason')} ({cause})",
                "mend the cause, then run the same command",
                evidence,
                "gave-up",
            )
        elif kind == "sink-down" and event.get("sink") not in up:
            yield Finding(NOTE + 5, str(event.get("text")), "training is not affected", evidence, "sink-down")


def _skipped(skips: list[Record], newest: list[Record], run: Run) -> Iterator[Finding]:
    """Steps whose numbers the guard did not trust; the end of a run that stopped over them, a note in one that goes on."""
    if not skips:
        return
    last, rewinds = skips[-1], sum(event.get("event") == "rewind" for event in newest)
    broken = last.get("reason") == "non-finite"
    said = [event.get("event") for event in newest if event.get("event") not in (*_BESIDE, "failed")]
    ended = said[-1] in ("skip", "rewind") and not is_held(run.root)
    what = f"the loss is {_short(last.get('loss'))} and the gradient norm {_short(last.get('grad_norm'))}"
    text = f"{len(skips)} steps were skipped, the last at step {last.get('step')}, where {what}" + (
        f", and {rewinds} rewinds did not help" if rewinds else ""
    )
    evidence = [
        f"events.jsonl: skip at step {event.get('step')}, samples {event.get('samples')}" for event in skips[-4:]
    ]
    weight = NUMBERS if ended else NOTE + 2
    yield Finding(
        weight,
        text,
        "lower optim.lr or lengthen optim.warmup, and look at the samples of those steps",
        evidence,
        "nan" if broken else "spike",
    )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _details(event: Record) -> list[str]:
    lines = [f"  {line}" for line in event.get("stack", [])[:8]]
    lines += [f"collective: {event['collective']}"] if event.get("collective") else []
    return lines + ([f"more in {event['debug']}"] if event.get("debug") else [])


_BESIDE = ("alert", "sink-down", "sink-up")  # events that may follow the one that ends a run


def _ranks_now(run: Run) -> Iterator[Finding]:
    """Who stands still or is gone, by the heart beats alone: for runs without a supervisor, and while it still waits."""
    beats = run.heartbeats()
    if not beats:
        return
    dead = {rank: beat for rank, beat in beats.items() if beat.get("alive") is False and beat.get("phase") != "done"}
    held = is_held(run.root)
    said = [event.get("event") for event in run.events() if event.get("event") not in _BESIDE]
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
        text = f"nobody has heard of {_names(silent)} for {time.time() - max(float(alive[r]['time']) for r in silent):.0f} s: the machine went away, or the file system does"
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
    "evaluate": "it is evaluating",
    "forward_backward": "it is in a forward or backward pass, or waits there for another rank",
    "optimizer": "it is in the optimiser, or waits there for another rank",
}


def _told(rank: int, beat: Record) -> str:
    age = time.time() - float(beat.get("time", 0))
    end = "" if beat.get("alive") else ", ended"
    return f"rank {rank} on {beat.get('host')}: step {beat.get('step')}, {beat.get('phase')} for {beat.get('phase_s', 0):.1f} s, process state {beat.get('state')}{end}, heard of {age:.0f} s ago"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _waiting(ranks: Sequence[int]) -> str:
    return f"{_names(ranks)} wait" + ("s" if len(ranks) == 1 else "")


def _numbers(run: Run) -> Iterator[Finding]:
    last = run.series.last
    loss, norm, scale = (last.get(key) for key in ("loss", "grad_norm", "loss_scale"))
    if any(isinstance(v, float) and not math.isfinite(v) for v in (loss, norm)) or (last and loss is None):
        yield Finding(
            NUMBERS - 1,
            f"at step {last.get('step')} the loss is {loss} and the gradient norm {norm}",
            "lower optim.lr or lengthen optim.warmup",
            [f"metrics.jsonl: step {last.get('step')}"],
            "nan",
        )
    if scale is not None:
        steps = [record for record in read_metrics(run.dir.metrics).values() if "skipped" in record][-20:]
        skipped = steps[-1]["skipped"] - (steps[0]["skipped"] if len(steps) > 1 else 0) if steps else 0
        passed = steps[-1]["step"] - (steps[0]["step"] if len(steps) > 1 else 0) if steps else 0
        if passed and skipped > 0.2 * passed:
            text = f"the loss scale overflowed in {int(skipped)} of the last {int(passed)} steps, which were skipped; it is {scale:g} now"
            yield Finding(
                OVERFLOW,
                text,
                "train.precision=bf16, whose range is wider, or a lower optim.lr",
                [f"metrics.jsonl: skipped {steps[-1]['skipped']} by step {steps[-1]['step']}"],
                "overflow",
            )
    raised = {alert["alert"]: alert for alert in _alerts(run) if alert.get("alert") in _ALERT_FIX}
    for kind, alert in raised.items():
        weight = {"disk-low": DISK - 10}.get(kind, WARNING - 10)
        told = f"at step {alert.get('step')}: {alert.get('text')}"
        yield Finding(weight, told, _ALERT_FIX[kind], [f"events.jsonl: alert at step {alert.get('step')}"], kind)


def _alerts(run: Run) -> list[Record]:
    """Those of the last hour of the run: what was alarming before that, and has not come again, is over."""
    newest = run.series.last.get("time") or 0.0
    alerts = [event for event in run.events() if event["event"] == "alert"]
    return [alert for alert in alerts if alert.get("time", 0.0) > newest - _RECENT_S]


_ALERT_FIX = {
    "spike": "watch whether it comes back; lower optim.lr, or look at the samples of that step",
    "throughput-drop": "look at the step's parts: data wait, communication, a slow rank, GPU clocks",
    "disk-low": "free some space, or lower checkpoint.keep",
}


def _disk(run: Run) -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(run.root)
    except OSError:
        return
    if usage.free < _FULL_BYTES:
        text = f"the disk is full: {usage.free / 2**20:.1f} of {usage.total / 2**30:.1f} GiB are free where {run.root} lies".replace(
            " of ", " MiB of ", 1
        )
        yield Finding(
            FULL,
            text,
            "free some space, keep fewer checkpoints (checkpoint.keep), or move runs_dir; the run goes on from its last good checkpoint",
            ["statvfs, now"],
            "disk-full",
        )


def _slow(run: Run) -> Iterator[Finding]:
    raised: dict[int, Record] = {}
    for event in _alerts(run):
        if event.get("alert") == "slow-rank":
            raised[int(event.get("rank", -1))] = event
    for rank, event in raised.items():
        host = run.heartbeats().get(rank, {}).get("host")
        where = f" (on {host})" if host else ""
        yield Finding(
            SLOW,
            f"{event.get('text')}{where}: the others wait for it at every step",
            "check that node's GPU clocks, temperature and neighbours; leave it out if it stays slow",
            [f"events.jsonl: alert at step {event.get('step')}", "ranks.jsonl"],
            "slow-rank",
        )


def _known(run: Run, logs: Sequence[Path]) -> Iterator[Finding]:
    files = [*logs, *_own_logs(run)]
    for path in files:
        lines = _tail(path)
        for match in matches(lines, path.name if path in logs else str(path.relative_to(run.root))):
            yield _of(match, run)


def _of(match: Match, run: Run) -> Finding:
    failure = match.failure
    verdict = f"{failure.cause} ({match.where})"
    if failure.name == "cuda-oom":
        verdict += _against_plan(run)
    weight = KNOWN if failure.severity == "fatal" else WARNING
    return Finding(weight, verdict, failure.fix, [f"{match.where}: {match.line[:300]}"], failure.name)


def _against_plan(run: Run) -> str:
    stages = run.plan().get("memory_gib")
    if not isinstance(stages, list) or not stages:
        return ""
    said = max(float(stage.get("device", 0.0)) for stage in stages if isinstance(stage, dict))
    return f" at step {int(run.series.last.get('step', 0)) + 1}: plan said {said:.0f} GiB, see `argosy plan --explain`"


def _own_logs(run: Run) -> list[Path]:
    """Of the newest attempt."""
    starts = [event.get("time", 0.0) for event in run.events() if event["event"] in ("start", "resume")]
    begun = starts[-1] - _STALE_S if starts else 0.0
    folders = [path for folder in ("logs", "debug") for path in (run.root / folder).rglob("*")]
    found = [path for path in folders if path.is_file() and path.stat().st_mtime >= begun]
    return sorted(
        (p for p in found if p.suffix in (".log", ".txt", ".stacks", ".err", ".out", ".json")),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )[:256]


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []

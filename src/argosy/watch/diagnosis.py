"""The diagnosis of a run: one verdict, then the evidence. Reads the run directory, and log files it is given.

Findings come from heartbeats, events, metrics, and known failures in log lines. Each has a weight for how directly it
explains that training does not go on; the heaviest is the verdict.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from argosy.record.jsonl import Record
from argosy.record.rank_logs import last_words
from argosy.watch.finding import (
    BESIDE,
    CONSEQUENCE,
    DEATH,
    DISK,
    FAILED,
    FINE,
    FULL,
    KNOWN,
    NOTE,
    NUMBERS,
    OVERFLOW,
    SLOW,
    STALL,
    WARNING,
    WELL,
    Finding,
)
from argosy.watch.knowledge import Failure, matches
from argosy.watch.log_causes import READ_BYTES, against_plan, from_logs
from argosy.watch.run_list import Run
from argosy.watch.standing import ranks_now

_OVERFLOW_LOGS = 20
# A file system with less free space is full.
_FULL_BYTES = 16 << 20
# Alerts count for this long, in seconds.
_RECENT_S = 3600.0
# Findings of a run that does not train.
_STANDS = ("stall", "hang", "rank-died", "silent", "failed", "gave-up")


def diagnose(run: Run, logs: Sequence[Path] = (), *, read_bytes: int = READ_BYTES) -> list[Finding]:
    """Return all findings, the verdict first; there is always one. At most `read_bytes` of logs are read."""
    run.series.update()
    found = [*_events(run), *ranks_now(run), *_numbers(run), *_disk(run), *_slow(run)]
    stands = any(finding.name in _STANDS for finding in found)
    state = "dead" if stands else run.state()
    for finding in from_logs(run, logs, state=state, read_bytes=read_bytes):
        reported = next(
            (other for other in found if other.name == finding.name and other.weight >= finding.weight), None
        )
        if reported is None:
            found.append(finding)
        else:
            # The run's events report the failure already.
            reported.evidence.extend(finding.evidence)
    well = _well(run)
    said_why = any(finding.weight > well.weight for finding in found)
    if well.name != "dead" or not said_why:
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
    }.get(state, f"the run ended without a message at {step}, and nothing here says why")
    fix = (
        ""
        if state != "dead"
        else "give the logs of its ranks or pods with --log; the same `argosy train` command goes on from the last checkpoint"
    )
    again = sum(event["event"] in ("resume", "rewind") for event in run.events())
    history = (
        f"; it went on from a checkpoint {again} time{'s' if again > 1 else ''}" if again and state != "dead" else ""
    )
    return Finding({"dead": WARNING - 5, "done": WELL}.get(state, FINE), text + history, fix, name=state)


def _events(run: Run) -> Iterator[Finding]:
    """Yield findings from the events of the newest attempt, written by supervisor and trainer."""
    events = run.events()
    starts = [i for i, event in enumerate(events) if event["event"] in ("start", "resume")]
    newest = events[starts[-1] :] if starts else events
    yield from _skipped([event for event in newest if event["event"] == "skip"], newest, run)
    yield from _unsaved(newest)
    up = {event.get("sink") for event in newest if event["event"] == "sink-up"}
    for event in newest:
        tell = _TELL.get(event["event"])
        if tell is not None and not (event["event"] == "sink-down" and event.get("sink") in up):
            evidence = [f"events.jsonl: {event['event']} at step {event.get('step')}", *_details(event)]
            yield tell(event, evidence, run)


def _stall(event: Record, evidence: list[str], run: Run) -> Finding:
    text = f"rank {event.get('rank')} made no progress for {event.get('seconds', 0):.0f} s at {_where(event)}: {event.get('cause', '')}"
    return Finding(STALL, text, "its stacks and collectives are in debug/", evidence, "stall")


def _died(event: Record, evidence: list[str], run: Run) -> Finding:
    cause = event.get("cause", "")
    known = _known([cause, *event.get("error", "").splitlines()])
    fix = known.fix if known else "the same command goes on from the last checkpoint; look at the rank's log"
    explained = cause if known is None else known.cause + (against_plan(run) if known.name == "cuda-oom" else "")
    evidence += last_words(run.root, int(event.get("rank", 0))) if known is None else [f"  {cause}"]
    return Finding(
        _weight(known, DEATH),
        f"rank {event.get('rank')} died at {_where(event)}: {explained}",
        fix,
        evidence,
        known.name if known else "rank-died",
    )


def _failed(event: Record, evidence: list[str], run: Run) -> Finding:
    cause = event.get("cause", "")
    known = _known(cause.splitlines())
    fix = event.get("fix") or (known.fix if known else "the same command goes on from the last checkpoint")
    text = f"rank {event.get('rank')} ended at step {event.get('step')}: {known.cause if known else cause}"
    evidence += [f"  {cause}"] if known else []
    # A refusal is named by its error code.
    weight = FAILED if event.get("code") else _weight(known, FAILED)
    return Finding(weight, text, fix, evidence, known.name if known else event.get("code", "failed"))


def _known(lines: list[str]) -> Failure | None:
    """Return the first known failure that is no consequence of another and says more than the line itself."""
    found = [match.failure for match in matches(lines, "events.jsonl") if "{line}" not in match.failure.cause]
    return min(found, key=lambda failure: failure.severity == "consequence", default=None)


def _weight(known: Failure | None, otherwise: int) -> int:
    return otherwise if known is None else CONSEQUENCE if known.severity == "consequence" else KNOWN


def _non_finite(event: Record, evidence: list[str], run: Run) -> Finding:
    text = f"at step {event.get('step')} the loss is {_short(event.get('loss'))} and the gradient norm {_short(event.get('grad_norm'))}"
    return Finding(NUMBERS, text, f"{_CALMER}, and look at the samples of that step", evidence, "nan")


def _unsaved(newest: list[Record]) -> Iterator[Finding]:
    """Yield a finding for failed saves after the last good one."""
    saved = max((i for i, event in enumerate(newest) if event["event"] == "save"), default=-1)
    failed = [event for event in newest[saved + 1 :] if event["event"] == "save-failed"]
    if not failed:
        return
    last = failed[-1]
    which = (
        f"the checkpoint of step {last.get('step')}"
        if len(failed) == 1
        else f"the last {len(failed)} checkpoints, of steps {failed[0].get('step')} to {last.get('step')},"
    )
    yield Finding(
        DISK,
        f"{which} could not be written: {last.get('cause') or last.get('text')}",
        "free some space, or move runs_dir; the older checkpoints are good",
        [f"events.jsonl: save-failed at step {event.get('step')}" for event in failed[-4:]],
        "save-failed",
    )


def _gave_up(event: Record, evidence: list[str], run: Run) -> Finding:
    text = f"the run was given up: {event.get('reason')} ({event.get('cause', '')})"
    return Finding(DEATH + 3, text, "mend the cause, then run the same command", evidence, "gave-up")


def _sink_down(event: Record, evidence: list[str], run: Run) -> Finding:
    return Finding(NOTE, event.get("text", ""), "training is not affected", evidence, "sink-down")


_TELL: dict[str, Callable[[Record, list[str], Run], Finding]] = {
    "stall": _stall, "rank-died": _died, "failed": _failed, "non-finite": _non_finite,
    "gave-up": _gave_up, "sink-down": _sink_down,
}  # fmt: skip
_CALMER = "lower optim.lr or lengthen optim.warmup"


def _where(event: Record) -> str:
    return f"step {event.get('step')} in {event.get('phase')}"


def _skipped(skips: list[Record], newest: list[Record], run: Run) -> Iterator[Finding]:
    """Yield a finding for steps that the guard skipped. It explains a run that stopped after them, and is a note if the run goes
    on."""
    if not skips:
        return
    last, rewinds = skips[-1], sum(event.get("event") == "rewind" for event in newest)
    broken = last.get("reason") == "non-finite"
    kinds = [event.get("event") for event in newest if event.get("event") not in (*BESIDE, "failed")]
    ended = kinds[-1] in ("skip", "rewind") and run.state() != "running"
    what = f"the loss is {_short(last.get('loss'))} and the gradient norm {_short(last.get('grad_norm'))}"
    text = (
        f"{len(skips)} step{'s were' if len(skips) > 1 else ' was'} skipped, the last at step {last.get('step')}, where {what}"
        + (f", and {rewinds} rewinds did not help" if rewinds else "")
    )
    evidence = [
        f"events.jsonl: skip at step {event.get('step')}, samples {event.get('samples')}" for event in skips[-4:]
    ]
    weight = NUMBERS if ended else NOTE
    yield Finding(
        weight,
        text,
        f"{_CALMER}, and look at the samples of those steps",
        evidence,
        "nan" if broken else "spike",
    )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "NaN" if value is None else str(value)


def _is_finite(value: float | None) -> bool:
    """Return whether the value is finite. None stands for NaN."""
    return value is not None and math.isfinite(value)


def _details(event: Record) -> list[str]:
    lines = [f"  {line}" for line in event.get("stack", [])[:8]]
    lines += [f"collective: {event['collective']}"] if event.get("collective") else []
    return lines + ([f"more in {event['debug']}"] if event.get("debug") else [])


def _numbers(run: Run) -> Iterator[Finding]:
    last = run.series.last
    loss, norm, scale = (last.get(key) for key in ("loss", "grad_norm", "loss_scale"))
    # In fp16, a step with an infinite gradient norm is repeated with a lower loss scale.
    metrics = ("loss",) if scale is not None else ("loss", "grad_norm")
    if any(key in last and not _is_finite(last[key]) for key in metrics):
        yield Finding(
            NUMBERS - 1,
            f"at step {last.get('step')} the loss is {_short(loss)} and the gradient norm {_short(norm)}",
            _CALMER,
            [f"metrics.jsonl: step {last.get('step')}"],
            "nan",
        )
    if scale is not None:
        yield from _overflow(run, scale)
    raised = {alert["alert"]: alert for alert in _alerts(run) if alert.get("alert") in _ALERT_FIX}
    for kind, alert in raised.items():
        weight = {"disk-low": DISK - 10}.get(kind, WARNING - 10)
        text = f"at step {alert.get('step')}: {alert.get('text')}"
        yield Finding(weight, text, _ALERT_FIX[kind], [f"events.jsonl: alert at step {alert.get('step')}"], kind)


def _overflow(run: Run, scale: float) -> Iterator[Finding]:
    """Yield a finding if more than 20% of the latest steps overflowed."""
    logs = run.series.latest("skipped", _OVERFLOW_LOGS + 1)
    first = logs[0] if len(logs) > _OVERFLOW_LOGS else (0, 0.0)
    last = logs[-1] if logs else first
    passed, skipped = last[0] - first[0], last[1] - first[1]
    if passed > 0 and skipped > 0.2 * passed:
        yield Finding(
            OVERFLOW,
            f"the loss scale overflowed in {skipped:.0f} of the last {passed} steps, which were skipped; it is {scale:g} now",
            "train.precision=bf16, whose range is wider, or a lower optim.lr",
            [f"metrics.jsonl: skipped {last[1]:.0f} by step {last[0]}"],
            "overflow",
        )


def _alerts(run: Run) -> list[Record]:
    """Return the alerts of the run's last hour. An earlier alert that did not come again is over."""
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
        text = f"the disk is full: {usage.free / 2**20:.1f} MiB of {usage.total / 2**30:.3g} GiB are free where {run.root} lies"
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

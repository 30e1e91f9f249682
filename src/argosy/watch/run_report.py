"""`argosy report`: a run on one page, as one HTML file that loads nothing and runs nothing, ready to print."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from typing import Any

from argosy.config.counts import describe_size
from argosy.config.layout import describe_layout
from argosy.config.schema import RunSpec
from argosy.console.formats import amount, clock
from argosy.errors import ArgosyError
from argosy.record.alerts import TROUBLE
from argosy.watch.diagnosis import diagnose
from argosy.watch.facts import config_rows, predicted, waterfall
from argosy.watch.picture import Curve, line_chart
from argosy.watch.run_list import Run

_CHARTS = (
    ("Loss", ("loss", "validation_loss")), ("Gradient norm", ("grad_norm",)), ("Tokens per second", ("tokens_per_s",)),
    ("Learning rate", ("lr",)), ("Step time, s", ("time/forward_backward", "time/optimizer", "time/communication", "time/data")),
    ("Memory, GiB", ("memory_gib",)),
)  # fmt: skip
_INCIDENTS = TROUBLE | {"restart", "resume", "interrupted", "sink-down"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1d2125;--soft:#5c656e;--line:#dfe2e6;--paper:#fff;--c0:#1f5fbf;--c1:#c2410c;--c2:#0f766e;--c3:#7c3aed}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#9aa4ad;--line:#30363c;--paper:#14171a;--c0:#79aaff;--c1:#ff9a6b;--c2:#4fd1c5;--c3:#b79bff}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--line:#ccc;--paper:#fff;--c0:#1f5fbf;--c1:#c2410c;--c2:#0f766e;--c3:#7c3aed}figure,tr{break-inside:avoid}}
body{font:14px/1.45 system-ui,"DejaVu Sans",sans-serif;color:var(--ink);background:var(--paper);max-width:1100px;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}p{margin:.3rem 0}.soft{color:var(--soft)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th{text-align:left;font-weight:500;color:var(--soft)}
td,th{padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td:last-child{overflow-wrap:anywhere}th{white-space:nowrap}td:first-child:not(:last-child){white-space:nowrap}.table{overflow-x:auto}@media print{.table{overflow:visible}}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:.6rem 1.2rem}figure{margin:0}figcaption{font-weight:600}
svg{width:100%}svg text{font-size:11px;fill:var(--soft)}.g{stroke:var(--line)}polyline{fill:none;stroke-width:1.5}
polygon{opacity:.18}.b0{fill:var(--c0)}.b1{fill:var(--c1)}.b2{fill:var(--c2)}.b3{fill:var(--c3)}.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}circle.f0{fill:var(--c0)}circle.f1{fill:var(--c1)}circle.f2{fill:var(--c2)}circle.f3{fill:var(--c3)}
span.f0{color:var(--c0)}span.f1{color:var(--c1)}span.f2{color:var(--c2)}span.f3{color:var(--c3)}.legend{font-size:12px}.legend span{margin-right:1rem}
.verdict{border-left:3px solid var(--c0);padding:.2rem .8rem}
"""


def page(run: Run) -> str:
    run.series.update()
    name, last = html.escape(run.name), run.series.last
    verdict = diagnose(run)[0]
    fix = f'<p class="soft">{html.escape(verdict.fix)}</p>' if verdict.fix else ""
    parts = [
        f"<h1>{name}</h1><p class='soft'>{html.escape(_subtitle(run))}</p>",
        f"<div class='verdict'><p>{html.escape(verdict.verdict)}</p>{fix}</div>",
        "<h2>Facts</h2>" + _table((), _facts(run)),
        "<h2>Curves</h2><div class='charts'>"
        + "".join(_chart(run, title, names) for title, names in _CHARTS)
        + "</div>",
    ]
    if last.get("spent"):
        total = sum(last["spent"].values()) or 1.0
        rows = [
            (row["part"], clock(row["seconds"]), f"{row['seconds'] / total:.1%}", row["meaning"])
            for row in waterfall(last)
        ]
        parts.append("<h2>Where the time went</h2>" + _table(("", "time", "share", ""), rows))
    if comparison := predicted(run):
        rows = [
            (row["figure"], _number(row["predicted"]), _number(row["measured"]), _number(row["ratio"]))
            for row in comparison
        ]
        parts.append("<h2>Predicted and measured</h2>" + _table(("figure", "predicted", "measured", "ratio"), rows))
    parts.append("<h2>Incidents</h2>" + _incidents(run))
    spec = [(row["key"], row["value"], row["origin"]) for row in config_rows(run) if row["origin"] != "default"]
    if spec:
        parts.append("<h2>Config, without defaults</h2>" + _table(("key", "value", "from"), spec))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _subtitle(run: Run) -> str:
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{run.state()}; this page was made {made} by argosy report"


def _facts(run: Run) -> list[tuple[object, ...]]:
    last = run.series.last
    rows: list[tuple[object, ...]] = []
    try:
        spec = RunSpec.model_validate(run.spec())
        rows += [("model", describe_size(spec.model)), ("layout", describe_layout(spec.parallel) or "one rank")]
        rows.append(("batch", f"{spec.train.global_batch} x {spec.data.seq_len} tokens"))
    except (ValueError, ArgosyError):
        # The spec is of another version. The metrics are shown without it.
        pass
    if last:
        mfu = (
            "n/a: no dense peak is known for the device"
            if last.get("mfu") is None
            else f"{last['mfu']:.1%} of {last.get('peak')} TFLOP/s"
        )
        rows += [
            ("steps", f"{last['step']:,}" + (f" of {last['steps']:,}" if last.get("steps") else "")),
            ("tokens", amount(last.get("tokens") or 0)), ("loss", _number(last.get("loss"))),
            ("tokens/s", amount(last.get("tokens_per_s") or 0.0)), ("MFU", mfu),
            ("step time", f"{_number(last.get('step_s'))} s"), ("memory", "n/a" if last.get("memory_gib") is None else f"{_number(last['memory_gib'])} GiB at its peak, of the first rank"),
            ("goodput", "n/a" if last.get("goodput") is None else f"{last['goodput']:.1%}"),
        ]  # fmt: skip
        if spent := last.get("spent"):
            rows.append(("wall time", clock(sum(spent.values()))))
        if last.get("cost") is not None:
            rows.append(("cost so far", f"${last['cost']:,.2f}"))
        if run.state() == "running":
            rows.append(("time left", clock(last.get("eta_s") or 0.0)))
    best = min(
        (record for record in run.series.curves(["validation_loss"]).get("validation_loss", {}).get("low", [])),
        default=None,
    )
    if best is not None:
        rows.append(("best validation loss", _number(best)))
    rows.append(("steps skipped by the guard", run.skips()))
    again = sum(event["event"] in ("resume", "rewind") for event in run.events())
    rows.append(("times it went on from a checkpoint", again))
    rows.append(("checkpoints", ", ".join(c["name"] for c in run.checkpoints()[:6]) or "none"))
    return rows


def _chart(run: Run, title: str, names: Sequence[str]) -> str:
    curves = run.series.curves(names, pieces=400)
    found = [(name, curves[name]) for name in names if name in curves]
    return line_chart(title, [Curve(name, c["step"], c["mean"], c["low"], c["high"]) for name, c in found])


def _incidents(run: Run) -> str:
    found = [event for event in run.events() if event.get("event") in _INCIDENTS]
    if not found:
        return "<p>none</p>"
    rows = []
    for event in found[-200:]:
        when = time.strftime("%m-%d %H:%M:%S", time.gmtime(event.get("time", 0.0)))
        text = event.get("text") or event.get("cause") or event.get("reason") or event.get("signal") or ""
        text = f"rank {event['rank']}: {text}" if "rank" in event and "text" not in event else text
        rows.append((when, event.get("step"), event.get("alert") or event.get("event"), text))
    return _table(("time, UTC", "step", "what", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_plain(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
    return f'<div class="table">{table}</div>'


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "n/a"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"

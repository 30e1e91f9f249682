"""The terminal view and the report."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from argosy.record.jsonl import JsonlWriter
from argosy.watch.live import screen
from argosy.watch.report import page
from argosy.watch.runs import Run
from record.run_dirs import log, make_run

Argosy = Callable[..., subprocess.CompletedProcess[str]]


def some_run(root: Path, name: str = "sea") -> Run:
    run = make_run(root / name, "log.price=4")
    log(run, range(10, 600, 10), cost=1.25, rank_spread=0.21, slowest_rank=3)
    with JsonlWriter(run.metrics) as metrics:
        metrics.write({"step": 590, "validation_loss": 2.75})
    with JsonlWriter(run.events) as events:
        events.write({"event": "start", "step": 0, "time": 1.0})
        events.write(
            {
                "event": "alert",
                "alert": "slow-rank",
                "step": 300,
                "time": 2.0,
                "rank": 3,
                "text": "rank 3 takes 21% longer",
            }
        )
    made = Run(name, run.root)
    made.series.update()
    return made


def test_the_terminal_shows_curves_time_ranks_and_events_in_any_size(tmp_path: Path) -> None:
    from rich.console import Console

    run = some_run(tmp_path)
    for width, height in ((120, 40), (80, 24), (200, 60)):
        console = Console(width=width, height=height, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(screen(run, width, height))
        text = console.export_text()
        for part in (
            "sea",
            "step 590/1000",
            "goodput 90%",
            "$1.25",
            "forward_backward",
            "slowest: rank 3",
            "slow-rank",
        ):
            assert part in text, (part, width)
        assert max(map(len, text.splitlines())) <= width


def test_where_there_is_no_terminal_there_is_a_line_for_each_step_and_event(tmp_path: Path, argosy: Argosy) -> None:
    some_run(tmp_path)
    done = argosy("watch", tmp_path / "sea", "--once")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert sum(line.startswith("step ") and "tok/s" in line for line in lines) == 59
    assert "step 590: validation loss 2.7500" in lines
    assert any("alert slow-rank rank 3 takes 21% longer" in line for line in lines)
    refused = argosy("watch", tmp_path)
    assert refused.returncode == 2
    assert "error[run.not-found]" in refused.stderr


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_one_file_that_loads_and_runs_nothing(tmp_path: Path, argosy: Argosy) -> None:
    some_run(tmp_path)
    done = argosy("report", tmp_path / "sea", "-o", tmp_path / "out.html")
    assert done.returncode == 0
    text = (tmp_path / "out.html").read_text()
    tags = Tags(text)
    assert not {tag for tag, _ in tags.found} & {"script", "link", "img", "iframe", "object"}
    assert not any(
        name in ("src", "href") or name.startswith("on") for _, attributes in tags.found for name in attributes
    )
    assert not re.search(r"https?://|url\(|@import", text)
    for part in (
        "Incidents",
        "slow-rank",
        "goodput",
        "best validation loss",
        "2.75",
        "Where the time went",
        "optim.lr",
    ):
        assert part in tags.text, part
    assert sum(tag == "svg" for tag, _ in tags.found) >= 5


def test_names_in_a_report_are_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)"
    run = tmp_path / evil
    run.mkdir()
    log(make_run(tmp_path / "model"), [10])
    with JsonlWriter(run / "metrics.jsonl") as metrics:
        metrics.write({"step": 1, "steps": 2, "loss": 1.0, evil: 3})
    with JsonlWriter(run / "events.jsonl") as events:
        events.write({"event": "alert", "alert": evil, "text": evil, "step": 1})
    text = page(Run(evil, run))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text

"""The terminal view and the report."""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from argosy.record.jsonl import JsonlWriter
from argosy.watch.diagnosis import diagnose
from argosy.watch.live import watch
from argosy.watch.picture import Curve, line_chart
from argosy.watch.reading import printable
from argosy.watch.run_list import Run
from argosy.watch.run_report import page
from argosy.watch.screen import screen
from record.run_dirs import log, make_run
from waiting import PATIENCE_S
from watch.conftest import TOKEN, Dashboard

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
    run = some_run(tmp_path)
    # Smaller terminals show less.
    for width, height in ((120, 40), (80, 24), (200, 60)):
        console = Console(width=width, height=height, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(screen(run, width, height))
        text = console.export_text()
        for part in (
            "sea",
            "step 590/1000",
            "goodput 90%",
            "$1.25",
            "fwd+bwd",
            "slowest: rank 3",
            "slow-rank",
        ):
            assert part in text, (part, width)
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= height
    small = Console(width=50, height=10, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    small.print(screen(run, 50, 10))
    assert "slow-rank" in small.export_text()


def test_nothing_a_run_is_called_or_says_reaches_the_terminal_as_a_command(tmp_path: Path, argosy: Argosy) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07"
    run = tmp_path / "runs"
    log(make_run(run), [10])
    with JsonlWriter(run / "events.jsonl") as events:
        events.write({"event": evil, "step": 1, "time": 1.0, "text": evil})
    done = argosy("watch", run, "--once")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout


BROKEN: dict[str, dict[str, bytes]] = {
    "no JSON": {"metrics.jsonl": b"garbage\n", "events.jsonl": b"\x00\xff\n", "ranks.jsonl": b"[", "resolved.json": b"{"},
    "other types": {
        "metrics.jsonl": b'{"step":5,"loss":"abc","spent":3,"steps":null,"time":null,"tokens_per_s":"x","mfu":"y","lr":[]}\n'
        b'{"step":6,"loss":1.5,"spent":{"productive":"x"},"peak":7,"time/data":{}}\n{"step":true}\n[1]\n',
        "events.jsonl": b'{"event":5}\n{"event":"stall","seconds":"x","step":"y","time":"z","rank":[]}\nnull\n'
        b'{"event":"alert","alert":7,"text":{"a":1},"time":-1e300}\n{"event":"rank-died","stack":"no list"}\n',
        "ranks.jsonl": b'{"step":1,"own_s":["a",null]}\n{"step":2,"own_s":[]}\n{"step":3,"own_s":[1,2],"data_s":[1]}\n',
        "resolved.json": b'{"spec": 3, "origins": []}',
        "plan.json": b'{"plans": [4]}',
        "heartbeat/0.json": b'{"rank":0,"time":"x","phase_s":"y","step":null}',
    },
    "beyond all bounds": {
        "metrics.jsonl": b'{"step":1,"loss":1e300,"steps":100000000000000000000,"tokens_per_s":-1e300,"eta_s":1e300,"goodput":1e9,"time":1}\n'
        b'{"step":2,"loss":2.0,"tokens_per_s":1e300,"\xc3\xbc":1}\n',
        "events.jsonl": b'{"event":"stall","stack":{"a":1}}\n{"event":"rank-died","stack":[1,2],"error":5,"collective":[1]}\n',
        "heartbeat/0.json": b'{"rank":0,"alive":true,"time":1e400}',
        "heartbeat/1.json": b'{"rank":1,"alive":true,"phase_s":1e9,"phase":"data","longest_s":"x"}',
    },
    "folders for files": {"metrics.jsonl/x": b"", "events.jsonl/x": b"", "resolved.json": b"[]"},
}  # fmt: skip


def broken_run(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_run_directory_is_told_of_as_far_as_it_goes(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = broken_run(tmp_path / "runs" / "broken", BROKEN[what])
    run = Run("broken", root)
    run.series.update()
    run.heat.update()
    assert run.heat.picture()
    assert diagnose(run)
    assert "<h1>broken" in page(run)
    Console(width=100, height=30, file=io.StringIO()).print(screen(run, 100, 30))
    watch(root, once=True)
    assert "broken is" in capsys.readouterr().out


@pytest.mark.parametrize("what", BROKEN)
def test_the_dashboard_answers_for_a_damaged_run_directory(dashboard: Dashboard, tmp_path: Path, what: str) -> None:
    broken_run(tmp_path / "runs" / "broken", BROKEN[what])
    with httpx.Client(
        base_url=dashboard.address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S
    ) as http:
        for path in ("runs", "run?run=broken", "ranks?run=broken", "verdict?run=broken", "config?run=broken"):
            assert http.get(f"/api/{path}").status_code == 200, path
        assert http.get("/api/diff?run=broken&run=broken").status_code == 200
        assert http.get("/api/curves?run=broken&metric=loss").status_code == 200


def test_a_checkpoint_that_goes_away_while_it_is_looked_at_is_left_out(tmp_path: Path) -> None:
    run = some_run(tmp_path)
    for step in (1, 2):
        (run.root / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (run.root / "checkpoints" / "step-00000003").symlink_to(tmp_path / "nowhere")
    assert [found["name"] for found in run.checkpoints()] == ["step-00000002", "step-00000001"]
    assert "step-00000002" in page(run)


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(dashboard: Dashboard, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path / "runs") + b"/odd-\xff"))
    log(make_run(tmp_path / "runs" / "plain"), [10])
    (tmp_path / "runs" / "plain").rename(path)
    assert "odd-\ufffd" in page(Run(path.name, path)).encode().decode()
    with httpx.Client(
        base_url=dashboard.address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S
    ) as http:
        (found,) = http.get("/api/runs").json()
        assert http.get("/api/run", params={"run": found["name"]}).json()["last"]["step"] == 10


def test_where_there_is_no_terminal_there_is_a_line_for_each_step_and_event(tmp_path: Path, argosy: Argosy) -> None:
    some_run(tmp_path)
    done = argosy("watch", tmp_path / "sea", "--once")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert sum(line.startswith("step ") and "tok/s" in line for line in lines) == 59
    assert "step 590: validation loss 2.7500" in lines
    assert any("alert slow-rank rank 3 takes 21% longer" in line for line in lines)
    for wrong in (tmp_path, tmp_path / "see"):
        refused = argosy("watch", wrong)
        assert refused.returncode == 2
        assert "error[run.not-found]" in refused.stderr
        assert f"as {tmp_path / 'sea'}" in refused.stderr


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


def test_a_skipped_step_is_told_with_its_numbers_wherever_a_run_is_shown(tmp_path: Path) -> None:
    run = some_run(tmp_path)
    text = "skipped, weights unchanged: gradient norm 3001 is above the limit 3000 and loss is 5"
    with JsonlWriter(run.dir.events) as events:
        events.write({"event": "skip", "step": 310, "time": 3.0, "text": text, "reason": "spike", "samples": [1, 8]})
    run = Run("sea", run.root)
    run.series.update()
    assert text in page(run)
    assert "<td>steps skipped by the guard</td><td>1</td>" in page(run)
    assert (run.summary()["skips"], run.summary()["alerts"]) == (1, 2)
    console = Console(width=200, height=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(run, 200, 60))
    assert f"step 310 skip {text}" in console.export_text()


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


def test_a_single_bad_step_among_many_is_seen_in_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long")
    with run.metrics.open("w") as file:
        for step in range(1, 50_001):
            file.write(f'{{"step":{step},"loss":{97 if step == 31_000 else 2 + step % 5 / 10}}}\n')
    text = page(Run("long", run.root))
    assert "polygon" in text
    labels = re.findall(r'text-anchor="end">([^<]+)</text>', text)
    # The ticks are round, and reach up to the value.
    assert {"20", "40", "60", "80"} <= set(labels)


@pytest.mark.parametrize("values", [[1e-3] * 9, [0.0] * 9, [-5.0, 5.0], [8.04e6, 8.15e6], [3e-7, 4e-7]])
def test_the_labels_of_an_axis_differ(values: list[float]) -> None:
    steps = [float(step) for step in range(len(values))]
    picture = line_chart("loss", [Curve("loss", steps, values, values, values)])
    labels = re.findall(r'<text x="50"[^>]*>([^<]+)</text>', picture)
    assert labels
    assert len(set(labels)) == len(labels)


def test_what_is_printed_is_one_line_that_moves_nothing() -> None:
    assert (
        printable("the newest\n  of 3 checkpoints\tis \x1b[2Jdamaged") == "the newest of 3 checkpoints is �[2Jdamaged"
    )

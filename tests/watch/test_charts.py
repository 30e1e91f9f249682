"""The dashboard's charts, tables, notes, samples and keys in a real Chromium, compared with the data they show.

All tests share one server, and runs that none of them changes; a test opens another page by its address only.
"""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from argosy.record.jsonl import JsonlWriter
from argosy.record.run_notes import RunNotes, read_notes, write_notes
from record.run_dirs import make_run, record
from waiting import wait_for
from watch.conftest import TOKEN, VIEWPORT, Dashboard, shown_whole

START = 1_700_000_000.0
SENSORS = {
    "gpu/utilisation": 0.93, "gpu/memory_gib": 70.0, "gpu/temperature": 61.0, "gpu/power_w": 5400.0, "host/cpu": 0.2,
    "host/memory_gib": 80.0, "host/received_mb_s": 900.0, "host/sent_mb_s": 870.0,
}  # fmt: skip


def loss(step: int) -> float:
    """Return the loss of a step: it falls, and is high and low in turns, so that smoothing changes it."""
    return 3.0 - step / 1000 + (0.5 if step % 20 else -0.5)


def sail(root: Path, name: str, last: int, start: float, *overrides: str) -> None:
    run = make_run(root / name, *overrides)
    with JsonlWriter(run.metrics) as metrics:
        for step in range(10, last + 1, 10):
            spent = {"productive": 9.0 * step, "startup": 10.0}
            metrics.write(record(step, loss=loss(step), time=start + 10 + 9.0 * step, spent=spent) | SENSORS)
            if step % 100 == 0:
                metrics.write({"step": step, "time": start + 10 + 9.0 * step, "validation_loss": 2.0 + step / 1000})
    with JsonlWriter(run.root / "samples.jsonl") as samples:
        for step in range(100, last + 1, 100):
            for prompt in ("The sea", "A ship"):
                samples.write({"step": step, "tokens": 8192 * step, "prompt": prompt, "text": f" of {name} at {step}"})
    (run.root / "logs/1").mkdir(parents=True)
    (run.root / "logs/1/0.log").write_text("".join(f"line {i}\n" for i in range(150)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("harbour")
    sail(root, "old", 1000, START, "optim.lr=1e-3")
    sail(root, "young", 500, START + 86_400, "optim.lr=3e-4", "train.global_batch=16")
    write_notes(root / "young", RunNotes(("sweep", "small-lr"), "half the steps"))
    return root


@pytest.fixture(scope="module")
def harbour(opened: Any, runs: Path) -> Iterator[Dashboard]:
    dashboard = Dashboard(runs)
    opened.goto(f"{dashboard.address}/?token={TOKEN}")
    yield dashboard
    dashboard.close()


class Sight:
    """The shared page, with the few things that tests look for on it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address

    def open(self, path: str = "", **query: Any) -> None:
        """Open a page of the dashboard as a link does. An empty page between makes it start anew."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/#/{path}" + (f"?{urlencode(query, doseq=True)}" if query else ""))
        shown_whole(self.page)

    def chart(self, title: str = "Loss") -> Any:
        return self.page.locator(f'[data-chart="{title}"]')

    def drawn(self, title: str = "Loss", curve: int = 0) -> list[tuple[float, float]]:
        curves = self.chart(title).locator("svg polyline:not(.raw)")
        curves.nth(curve).wait_for(state="attached")
        points = str(curves.nth(curve).get_attribute("points"))
        return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]

    def point_at(self, x: float, title: str = "Loss") -> list[str]:
        """Move the pointer to a place of a chart's drawing, which is 440 units wide, and return the lines of the tip."""
        box = self.chart(title).locator("svg").bounding_box()
        self.page.mouse.move(box["x"] + x / 440 * box["width"], box["y"] + box["height"] / 2)
        return self.tip(title)

    def tip(self, title: str = "Loss") -> list[str]:
        tip = self.chart(title).locator(".tip")
        return [str(line) for line in tip.locator(":scope > div").all_inner_texts()] if tip.is_visible() else []

    def texts(self, selector: str) -> list[str]:
        return [str(text).strip() for text in self.page.locator(selector).all_text_contents()]

    def wait_for_charts(self) -> None:
        """Wait until each chart has drawn what the server sent for the part of the run that is shown now."""
        wait_for(lambda: self.page.locator('[data-chart][aria-busy="true"]').count() == 0)

    def download(self, button: Any) -> bytes:
        with self.page.expect_download() as found:
            button.click()
        return Path(found.value.path()).read_bytes()


@pytest.fixture
def sight(opened: Any, harbour: Dashboard) -> Iterator[Sight]:
    opened.problems.clear()
    opened.mouse.move(0, 0)
    yield Sight(opened, harbour.address)
    opened.set_viewport_size(VIEWPORT)
    assert opened.problems == []


def test_the_tip_shows_values_as_they_were_logged_however_much_is_smoothed(sight: Sight) -> None:
    sight.open("runs", run="old", smooth=0.95)
    points = sight.drawn()
    for i in (19, 50, 79):
        step = 10 * (i + 1)
        head, training, validation = sight.point_at(points[i][0])
        assert head == f"step {step}"
        assert training.startswith(f"{loss(step):.4g} loss, smoothed ")
        assert abs(float(training.split()[-1]) - loss(step)) > 0.1
        nearest = round(step / 100) * 100
        assert validation.startswith(f"{2.0 + nearest / 1000:.4g} validation_loss")
        assert "smoothed" not in validation
        # A value of another step says which.
        assert ("at step" in validation) == (nearest != step)


def test_the_tip_shows_nothing_of_a_run_beyond_its_end(sight: Sight) -> None:
    sight.open("runs", run=["old", "young"])
    long, short = sight.drawn(curve=0), sight.drawn(curve=1)
    assert short[-1][0] < long[-1][0]
    both = sight.point_at(short[-1][0])
    assert {line.split()[1].rstrip(",") for line in both[1:]} == {"old", "young", "validation"}
    beyond = sight.point_at(long[70][0])
    assert beyond[0] == "step 710"
    assert not any("young" in line for line in beyond)
    assert sum("old" in line for line in beyond) == 2


def test_a_click_in_a_legend_hides_a_run_in_all_charts_and_the_link_keeps_it_hidden(sight: Sight) -> None:
    sight.open("runs", run=["old", "young"])
    sight.drawn("Gradient norm", curve=1)
    sight.chart().get_by_role("button", name="young").click()
    for title in ("Loss", "Gradient norm"):
        wait_for(lambda title=title: sight.chart(title).locator("svg polyline").count() == 1)
    assert "young" not in "".join(sight.point_at(sight.drawn()[20][0]))
    assert "hide=young" in sight.page.url
    sight.page.keyboard.press("Enter")
    sight.drawn("Gradient norm", curve=1)
    assert "hide=" not in sight.page.url


def test_the_tip_goes_with_a_zoom_and_comes_back_with_the_values_that_are_there_then(sight: Sight) -> None:
    sight.open("runs", run="old")
    whole = sight.drawn()
    box = sight.chart().locator("svg").bounding_box()
    assert sight.point_at(300)
    sight.page.mouse.down()
    sight.page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 50, steps=3)
    sight.page.mouse.up()
    assert sight.tip() == []
    wait_for(lambda: sight.drawn() != whole)
    assert sight.tip() == []
    sight.wait_for_charts()
    points = sight.drawn()
    middle = points[len(points) // 2][0]
    step = int(sight.point_at(middle)[0].removeprefix("step "))
    assert sight.tip()[1].startswith(f"{loss(step):.4g} loss")
    # By keys as well: the tip of another part of the run would be wrong.
    sight.chart().locator("svg").focus()
    sight.page.keyboard.press("ArrowLeft")
    wait_for(lambda: sight.tip() == [])


def test_the_x_axis_counts_steps_tokens_or_time_and_both_scales_are_said_on_the_chart(sight: Sight) -> None:
    sight.open("runs", run="old")
    by_step = sight.drawn()
    assert sight.texts('[data-chart="Loss"] .x-scale') == ["step"]
    assert sight.texts('[data-chart="Loss"] .y-scale') == ["linear"]
    assert sight.texts('[data-chart="Gradient norm"] .y-scale') == ["log scale"]
    sight.page.get_by_label("x axis").select_option("tokens")
    wait_for(lambda: sight.texts('[data-chart="Loss"] .x-scale') == ["tokens"])
    wait_for(lambda: sight.point_at(by_step[49][0])[:1] == ["step 500 · 4.096M tokens"])
    sight.page.get_by_label("x axis").select_option("time")
    # 10 seconds of start-up, and 9 seconds a step.
    wait_for(lambda: sight.point_at(by_step[49][0])[:1] == ["step 500 · 1h15m since the start"])
    assert sight.texts('[data-chart="Loss"] .x-scale') == ["time since the start, h"]
    sight.page.get_by_label("x axis").select_option("step")
    sight.page.get_by_label("x scale").select_option("log")
    sight.wait_for_charts()
    assert sight.texts('[data-chart="Loss"] .x-scale') == ["step, log scale"]
    points = sight.drawn()
    # From 10 to 1,000, step 100 is in the middle of a logarithmic axis.
    assert points[9][0] == pytest.approx((points[0][0] + points[-1][0]) / 2, abs=0.2)
    sight.chart().get_by_role("button", name="y: linear").click()
    assert sight.texts('[data-chart="Loss"] .y-scale') == ["log scale"]


def test_a_link_shows_the_same_part_axes_charts_and_filter_again(sight: Sight) -> None:
    sight.open("runs", run=["old", "young"])
    sight.drawn()
    sight.page.get_by_label("x axis").select_option("tokens")
    sight.page.get_by_label("smoothing").fill("0.6")
    sight.page.get_by_label("add a chart").select_option("tflops")
    sight.chart().get_by_role("button", name="y: linear").click()
    wait_for(lambda: sight.texts('[data-chart="tflops"] .x-scale') == ["tokens"])
    sight.chart().locator("svg").focus()
    sight.page.keyboard.press("+")
    wait_for(lambda: "from=" in sight.page.url)

    def shown() -> list[Any]:
        return [sight.drawn(), sight.drawn(curve=1), sight.drawn("tflops")]

    sight.wait_for_charts()
    before, link = shown(), sight.page.url
    sight.page.goto("about:blank")
    sight.page.goto(link)
    shown_whole(sight.page)
    wait_for(lambda: shown() == before)
    assert sight.page.get_by_label("x axis").input_value() == "tokens"
    assert sight.page.get_by_label("smoothing").input_value() == "0.6"
    assert sight.texts('[data-chart="Loss"] .y-scale') == ["log scale"]


def test_a_chart_is_saved_as_every_value_it_shows_and_as_a_picture(sight: Sight) -> None:
    sight.open("runs", **{"run": ["old", "young"], "from": 450, "to": 550})
    sight.drawn()
    text = sight.download(sight.chart().get_by_role("link", name="CSV")).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == ["run", "step", "tokens", "seconds", "loss", "validation_loss"]
    steps = [(row["run"], int(row["step"])) for row in rows]
    assert steps == [("old", step) for step in range(450, 551, 10)] + [("young", step) for step in range(450, 501, 10)]
    for row in rows:
        step = int(row["step"])
        assert (float(row["loss"]), int(row["tokens"]), float(row["seconds"])) == pytest.approx(
            (loss(step), 8192 * step, 10 + 9.0 * step)
        )
        assert row["validation_loss"] == (f"{2.0 + step / 1000:.7g}" if step % 100 == 0 else "")
    picture = sight.download(sight.chart().get_by_role("button", name="PNG"))
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 880
    assert height > 416
    # Colours of the page, the curves and the text compress to far more than an empty picture does.
    assert len(picture) > 8_000


def test_runs_are_listed_newest_first_with_validation_size_and_duration(sight: Sight) -> None:
    sight.open()
    wait_for(lambda: sight.texts("td.name") == ["young", "old"])
    heads = [head.removesuffix(" ↓") for head in sight.texts("thead th")]
    row = dict(zip(heads, sight.texts("tbody tr:first-child td"), strict=True))
    assert (row["validation"], row["best validation"], row["size"]) == ("2.5", "2.1", "124.4M")
    assert (row["duration"], row["started, UTC"], row["tags"]) == ("1h15m", "2023-11-15 22:13", "sweep small-lr")
    sight.page.locator(".filter").fill("sweep")
    wait_for(lambda: sight.texts("td.name") == ["young"])


def test_the_table_of_hyper_parameters_and_results_is_sorted_filtered_and_saved(sight: Sight) -> None:
    sight.open("table")
    wait_for(lambda: sight.texts("td.name") == ["old", "young"])
    heads = sight.texts("thead th")
    # Keys that somebody set, and no others until they are asked for.
    assert {"optim.lr", "train.global_batch", "loss"} <= set(heads)
    assert not {"optim.min_lr", "optim.name"} & set(heads)
    sight.page.get_by_label("sort by optim.lr").click()
    wait_for(lambda: sight.texts("td.name") == ["old", "young"])
    sight.page.keyboard.press("Enter")
    wait_for(lambda: sight.texts("td.name") == ["young", "old"])
    for text, found in (
        ("lr<5e-4", ["young"]),
        ("global_batch>=8 loss<1.8", ["old"]),
        ("state=dead", ["young", "old"]),
    ):
        sight.page.locator(".filter").fill(text)
        wait_for(lambda found=found: sight.texts("td.name") == found)
    rows = list(csv.DictReader(io.StringIO(sight.download(sight.page.get_by_role("button", name="CSV")).decode())))
    assert [(row["run"], float(row["optim.lr"]), int(row["train.global_batch"])) for row in rows] == [
        ("young", 3e-4, 16),
        ("old", 1e-3, 8),
    ]
    sight.page.get_by_text("Columns", exact=True).click()
    sight.page.get_by_label("optim.min_lr").check()
    assert "optim.min_lr" in sight.texts("thead th")
    link = sight.page.url
    sight.page.goto("about:blank")
    sight.page.goto(link)
    shown_whole(sight.page)
    assert sight.texts("td.name") == ["young", "old"]
    assert "optim.min_lr" in sight.texts("thead th")


def test_samples_are_shown_over_time_and_side_by_side(sight: Sight) -> None:
    sight.open("runs", run=["old", "young"])
    card = sight.page.locator('[data-card="Samples"]')
    wait_for(lambda: card.locator("pre").all_inner_texts() == ["The sea of old at 1000", "The sea of young at 500"])
    card.get_by_label("prompt").select_option("A ship")
    slider = card.get_by_label("step of the sample")
    slider.focus()
    sight.page.keyboard.press("Home")
    wait_for(lambda: card.locator("pre").all_inner_texts() == ["A ship of old at 100", "A ship of young at 100"])
    assert "819.2K tokens" in card.inner_text()


def test_the_machines_use_temperature_power_memory_and_network_are_drawn_over_time(sight: Sight) -> None:
    sight.open("runs", run="old")
    for title, said in (
        ("GPU use", "0.93"), ("GPU temperature, °C", "61"), ("GPU power, W", "5400"), ("GPU memory, GiB", "70"),
        ("Network, MB/s", "900"), ("CPU use", "0.2"), ("Host memory, GiB", "80"),
    ):  # fmt: skip
        assert len(sight.drawn(title)) > 1
        sight.chart(title).scroll_into_view_if_needed()
        assert any(said in line for line in sight.point_at(300, title)), title


def test_a_log_opens_at_its_end_and_stays_where_it_was_scrolled_to(sight: Sight, runs: Path) -> None:
    sight.open("runs", run="old")
    log = sight.page.locator('[data-card="Log"] pre')
    log.wait_for()
    end = "e => e.scrollHeight > 2 * e.clientHeight && e.scrollTop + e.clientHeight >= e.scrollHeight - 4"
    wait_for(lambda: log.evaluate(end))
    log.evaluate("e => e.scrollTo(0, 40)")
    with (runs / "old/logs/1/0.log").open("a") as file:
        file.write("one more line\n")
    log.get_by_text("one more line").wait_for()
    assert log.evaluate("e => e.scrollTop") == 40


def test_a_note_and_tags_are_written_into_the_run_directory(sight: Sight, runs: Path) -> None:
    sight.open("runs", run="old")
    sight.page.get_by_role("button", name="Add tags or a note").click()
    sight.page.get_by_label("tags, separated by spaces").fill("base, first")
    sight.page.get_by_label("note", exact=True).fill("<b>the one to beat</b>")
    sight.page.get_by_role("button", name="Save").click()
    sight.page.get_by_text("<b>the one to beat</b>", exact=True).wait_for()
    assert read_notes(runs / "old") == RunNotes(("base", "first"), "<b>the one to beat</b>")
    sight.page.get_by_role("button", name="Edit note").click()
    sight.page.get_by_label("tags, separated by spaces").fill("x" * 41)
    sight.page.get_by_role("button", name="Save").click()
    sight.page.get_by_text("is not a tag").wait_for()
    # The browser reports the refused request.
    sight.page.problems.clear()
    assert json.loads((runs / "old/notes.json").read_text())["tags"] == ["base", "first"]


def test_keys_reach_every_page_run_and_value(sight: Sight) -> None:
    sight.open()
    wait_for(lambda: sight.texts("td.name") == ["young", "old"])
    for key in "jxjx":
        sight.page.keyboard.press(key)
    # A refresh of the list keeps the focus where it is.
    with sight.page.expect_response("**/api/runs"):
        pass
    wait_for(lambda: sight.page.evaluate("document.activeElement.textContent") == "old")
    sight.page.keyboard.press("c")
    sight.drawn(curve=1)
    sight.chart().locator("svg").focus()
    sight.page.keyboard.press("Shift+ArrowRight")
    spoken = sight.chart().locator("[role=status]").inner_text()
    assert spoken.startswith("step ")
    assert "; " in spoken
    sight.page.keyboard.press("?")
    assert sight.page.get_by_role("dialog").is_visible()
    sight.page.keyboard.press("Escape")
    sight.page.keyboard.press("t")
    sight.page.get_by_role("heading", name="Hyper-parameters and results").wait_for()
    sight.page.keyboard.press("/")
    assert sight.page.evaluate("document.activeElement.type") == "search"


def test_the_colours_are_switched_and_remembered(sight: Sight) -> None:
    sight.open()
    dark = "getComputedStyle(document.body).backgroundColor"
    before = sight.page.evaluate(dark)
    try:
        for _ in range(2):
            sight.page.locator("#theme").click()
        assert "dark" in sight.page.locator("#theme").inner_text()
        assert sight.page.evaluate(dark) != before
        sight.page.reload()
        assert sight.page.evaluate(dark) != before
    finally:
        sight.page.evaluate("localStorage.clear()")


def test_at_420_pixels_tables_scroll_inside_the_page_by_keys_too_and_show_that_they_do(sight: Sight) -> None:
    sight.page.set_viewport_size({"width": 420, "height": 800})
    for path, query in (("", {}), ("table", {}), ("runs", {"run": ["old", "young"]})):
        sight.open(path, **query)
        region = sight.page.locator(".scroll").last
        region.locator("tbody tr").nth(1).wait_for()
        assert sight.page.evaluate("document.documentElement.scrollWidth") <= 420
        inside = "e => [e.scrollWidth > e.clientWidth + 20, e.tabIndex, getComputedStyle(e).backgroundAttachment]"
        more, tab, cue = region.evaluate(inside)
        assert more
        assert tab == 0
        assert cue == "local, local, scroll, scroll"
    # While the row is scrolled, the name of its run stays.
    sight.open()
    wait_for(lambda: sight.texts("td.name") == ["young", "old"])
    sight.page.locator(".scroll").evaluate("e => e.scrollTo(400, 0)")
    assert sight.page.locator("td.name").first.bounding_box()["x"] < 30

"""The dashboard in a real Chromium."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from argosy.plan.advise import Question, answer
from argosy.plan.clusters import compare
from argosy.record.jsonl import JsonlWriter
from record.run_dirs import log, make_run, record
from waiting import wait_for
from watch.conftest import TIMEOUT_MS, Dashboard, shown_whole


def chart(page: Any, title: str) -> Any:
    return page.locator(f'[data-chart="{title}"] svg')


def drawn_to(page: Any, title: str) -> str:
    """Return the points of a chart's first curve."""
    return str(chart(page, title).locator("polyline").first.get_attribute("points"))


def ask_planner(model: str, cluster: str, spot: float | None = None) -> Question:
    return Question.read(
        model, [], cluster=cluster, global_batch=None, seq_len=None, tokens=None, precision=None, what_if=None, price=None,
        hardware=None, spot=spot,
    )  # fmt: skip


def test_a_run_is_listed_opened_and_zoomed_by_mouse_and_keys(page: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "sea", "log.price=3")
    log(run, range(10, 2000, 10), rank_spread=0.02, slowest_rank=1)
    with JsonlWriter(run.ranks) as ranks:
        for step in range(10, 2000, 10):
            ranks.write({"step": step, "time": 1.0, "stages": 1, "own_s": [1.0, 1.2], "data_s": [0.0, 0.0]})
    (run.root / "plan.json").write_text(
        '{"step_s": 9.5, "tokens_per_s_gpu": 850, "mfu": 0.5, "memory_gib": [{"allocated": 2.9}]}'
    )
    page.reload()
    shown_whole(page)
    page.get_by_role("link", name="sea").click()
    chart(page, "Loss").locator("polyline").wait_for()
    for card in ("Where the time went", "Predicted and measured", "Checkpoints", "Ranks over time", "Events", "Config"):
        page.locator(f'[data-card="{card}"]').wait_for()
    shown_whole(page)
    whole = drawn_to(page, "Loss")
    box = chart(page, "Loss").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 50, steps=4)
    page.mouse.up()
    wait_for(lambda: drawn_to(page, "Loss") != whole)
    # The rest begins near 1,000.
    assert "500" not in chart(page, "Loss").locator("text").all_text_contents()
    chart(page, "Loss").focus()
    page.keyboard.press("Escape")
    wait_for(lambda: drawn_to(page, "Loss") == whole)
    page.keyboard.press("+")
    wait_for(lambda: drawn_to(page, "Loss") != whole)
    # The other charts show the same steps.
    zoomed = drawn_to(page, "Gradient norm")
    chart(page, "Loss").focus()
    page.keyboard.press("Escape")
    wait_for(lambda: drawn_to(page, "Gradient norm") != zoomed)
    heat = page.locator('[data-card="Ranks over time"]')
    heat.locator("select").select_option("own_s")
    wait_for(lambda: "from 1 to 1.2" in heat.inner_text())
    page.locator("input[type=range]").fill("0.9")
    page.keyboard.press("g")
    page.get_by_role("link", name="sea").wait_for()
    assert page.problems == []


def test_a_chart_grows_while_a_training_runs_without_reloading(page: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "tiny")
    # The lock that a trainer holds.
    run.open_for_training()
    log(run, range(1, 20))
    page.goto(f"{dashboard.address}/#/runs?run=tiny")
    page.reload()
    shown_whole(page)
    chart(page, "Loss").locator("polyline").wait_for()
    assert page.locator(".tile .state").inner_text() == "running"
    page.evaluate("window.notReloaded = true")
    before = drawn_to(page, "Loss")
    log(run, range(20, 40))
    wait_for(lambda: drawn_to(page, "Loss") != before)
    assert page.evaluate("window.notReloaded")
    run.close()
    wait_for(lambda: page.locator(".tile .state").inner_text() == "dead")
    assert page.problems == []


def test_several_runs_are_compared_on_one_axis_with_their_specs_side_by_side(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    for name, lr in (("warm", "1e-3"), ("hot", "2e-3")):
        log(make_run(tmp_path / "runs" / name, f"optim.lr={lr}"), range(10, 300, 10))
    page.reload()
    shown_whole(page)
    for name in ("warm", "hot"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare").click()
    wait_for(lambda: chart(page, "Loss").locator("polyline").count() == 2)
    differing = page.locator('[data-card="What differs in their specs"]')
    differing.wait_for()
    assert "optim.lr" in differing.inner_text()
    assert "train.global_batch" not in differing.inner_text()
    assert page.problems == []


def test_runs_are_sorted_by_a_click_or_a_key_on_a_heading(page: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    for name, last in (("b", 300), ("a", 100), ("c", 200)):
        log(make_run(tmp_path / "runs" / name), range(10, last, 10))
    # A run without the metric is always sorted last.
    make_run(tmp_path / "runs" / "none")
    page.reload()
    shown_whole(page)

    def names() -> list[str]:
        return [str(name) for name in page.locator("tbody a").all_text_contents()]

    # Each run's first log has the same time, so that only the run without one is newer.
    wait_for(lambda: names()[:1] == ["none"] and len(names()) == 4)
    page.get_by_label("sort by step").click()
    wait_for(lambda: names() == ["b", "c", "a", "none"])
    page.keyboard.press("Enter")
    wait_for(lambda: names() == ["a", "c", "b", "none"])
    assert page.problems == []


def test_a_run_in_trouble_says_so_at_the_top_and_one_without_figures_says_that(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "sunk")
    log(run, range(10, 100, 10))
    with JsonlWriter(run.events) as events:
        events.write({"event": "start", "step": 0, "time": 1.0})
        facts = {"rank": 3, "phase": "data", "seconds": 50.0, "stack": ["File a.py, line 1", "File b.py, line 2"]}
        events.write({"event": "stall", "step": 90, "time": 2.0, "cause": "it reads from a file", **facts})
    page.goto(f"{dashboard.address}/#/runs?run=sunk")
    page.reload()
    shown_whole(page)
    page.locator(".verdict").wait_for()
    assert "rank 3 made no progress" in page.locator(".verdict").inner_text()
    assert "it reads from a file" in page.locator('[data-card="Events"]').inner_text()
    page.get_by_text("stack", exact=True).click()
    page.get_by_text("File b.py, line 2").wait_for()
    make_run(tmp_path / "runs" / "new")
    page.goto(f"{dashboard.address}/#/runs?run=new")
    page.get_by_text("nothing logged yet").wait_for()
    shown_whole(page)
    assert "NaN" not in page.locator("main").inner_text()
    assert page.problems == []


def test_hostile_names_are_text_and_no_script_runs(page: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    evil = '<img src=x onerror="window.owned=1">'
    run = tmp_path / "runs" / evil.replace("/", "")
    run.mkdir()
    with JsonlWriter(run / "metrics.jsonl") as metrics:
        for step in range(1, 50):
            metrics.write(record(step) | {evil: 1.0 * step, "</script><script>window.owned=2</script>": 2.0})
    with JsonlWriter(run / "events.jsonl") as events:
        events.write({"event": evil, "step": 1, "time": 1.0, "text": evil})
    (run / "logs/1").mkdir(parents=True)
    (run / "logs/1/0.log").write_text(f"{evil}\n")
    (run / "logs/1/1.log").write_text("rank one\n")
    page.reload()
    shown_whole(page)
    page.get_by_role("link", name=evil).click()
    page.locator('[data-card="Events"]').wait_for()
    page.locator('[data-card="Log"] pre').get_by_text(evil).wait_for()
    page.get_by_label("whose log is shown").select_option("1")
    page.locator('[data-card="Log"] pre').get_by_text("rank one").wait_for()
    (run / "logs/1/1.log").write_text("rank one\nbetween two steps\n")
    page.locator('[data-card="Log"] pre').get_by_text("between two steps").wait_for()
    page.get_by_label("add a chart").select_option(evil)
    page.wait_for_timeout(300)
    assert page.evaluate("window.owned") is None
    assert page.locator("main img").count() == 0
    assert page.problems == []


def test_a_file_that_is_cut_or_grows_mid_line_is_shown_as_far_as_it_is_whole(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "torn")
    log(run, range(10, 200, 10))
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 200, "loss": 1')
    page.goto(f"{dashboard.address}/#/runs?run=torn")
    page.reload()
    shown_whole(page)
    chart(page, "Loss").locator("polyline").wait_for()
    before = drawn_to(page, "Loss")
    with run.metrics.open("ab") as file:
        file.write(b'.5, "tokens_per_s": 5, "lr": 1}\n')
    wait_for(lambda: drawn_to(page, "Loss") != before)
    os.truncate(run.metrics, 0)
    log(run, [10, 20])
    wait_for(lambda: "20" in page.locator(".tile", has_text="step").first.inner_text())
    assert page.problems == []


def test_the_planner_answers_and_refuses_in_the_page(page: Any, dashboard: Dashboard) -> None:
    page.goto(f"{dashboard.address}/#/plan?model=gpt2&cluster=8xH100")
    page.reload()
    shown_whole(page)
    page.locator("tbody tr").first.wait_for()
    wait_for(lambda: page.locator(".memory rect").count() > 3)
    advice = answer(ask_planner("gpt2", "8xH100"), top=12).as_dict()
    best, shown = advice["plans"][0], page.locator("main").inner_text()
    for text in (best["notation"], best["time"], best["cost"], *advice["copy"], *advice["legend"], *advice["why_lost"]):
        assert text in shown
    assert "±" in best["time"]
    assert "20 a parameter" in shown, "the length that was taken, as none was given"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy what goes on the command line").click()
    wait_for(lambda: page.evaluate("navigator.clipboard.readText()") == advice["copy"][1])
    page.locator("input[name=cluster]").fill("3xZX81")
    page.get_by_role("button", name="Plan").click()
    page.locator(".problem").wait_for()
    assert "ZX81" in page.locator(".problem").inner_text()


def test_clusters_are_compared_in_the_page_and_the_cheapest_in_time_is_named(page: Any, dashboard: Dashboard) -> None:
    page.goto(f"{dashboard.address}/#/plan?model=gpt2&cluster=g5.48xlarge&within=1")
    page.reload()
    shown_whole(page)
    page.get_by_role("button", name="compare with another cluster").click()
    page.locator("input[name=cluster]").nth(1).fill("1xp5.48xlarge")
    page.get_by_text("more", exact=True).click()
    page.locator("input[name=spot]").fill("0.5")
    page.get_by_role("button", name="Plan").click()
    found = compare(["g5.48xlarge", "1xp5.48xlarge"], lambda one: answer(ask_planner("gpt2", one, spot=0.5)), 1.0)
    wait_for(lambda: page.locator(".answer").all_text_contents() == [found.verdict()])
    rows = page.locator('[data-card="Clusters"] tbody tr')
    assert [row.split()[0] for row in rows.all_inner_texts()] == list(found.answers)
    assert "best" in rows.nth(list(found.answers).index(str(found.cheapest))).inner_text()
    assert "spot at 50% of on-demand" in page.locator("main").inner_text()
    # The address keeps the question.
    page.reload()
    shown_whole(page)
    wait_for(lambda: page.locator(".answer").all_text_contents() == [found.verdict()])
    rows.first.locator("a").click()
    page.locator('[data-card="To copy"]').wait_for()
    assert page.locator("input[name=spot]").input_value() == "0.5"
    assert page.locator("input[name=within]").input_value() == ""
    assert page.problems == []


def test_a_run_is_planned_for_other_gpus_from_its_page(page: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    log(make_run(tmp_path / "runs" / "sea"), range(10, 100, 10))
    page.goto(f"{dashboard.address}/#/runs?run=sea")
    page.reload()
    shown_whole(page)
    page.get_by_role("link", name="plan it on other GPUs").click()
    page.locator('[data-card="The run\'s own layout"]').wait_for()
    assert "the run spec's length" in page.locator(".tiles").inner_text()


def test_a_narrow_dark_screen_has_no_sideways_scrolling(browser: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    log(
        make_run(tmp_path / "runs" / "a-run-with-quite-a-long-name.of-63-characters-as-names-may-have"),
        range(10, 300, 10),
    )
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"{dashboard.address}/?token={quote('a token of the test')}")
    page.locator("tbody a").click()
    page.locator('[data-card="Events"]').wait_for()
    shown_whole(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.goto(f"{dashboard.address}/#/plan?model=gpt2&cluster=8xH100&cluster=1xg5.48xlarge")
    page.locator('[data-card="Clusters"]').wait_for()
    shown_whole(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background)[:3])) < 150
    context.close()


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_run_of_very_many_steps_is_shown_whole_and_a_single_bad_step_in_it_found_by_zooming(
    page: Any, dashboard: Dashboard, tmp_path: Path, count: int
) -> None:
    run, bad = tmp_path / "runs" / "long", count * 6 // 10
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            file.write(f'{{"step":{step},"steps":{count},"loss":{99 if step == bad else 2 + step % 5 / 10}}}\n')
    page.goto(f"{dashboard.address}/#/runs?run=long")
    page.reload()
    shown_whole(page)
    chart(page, "Loss").locator("polyline").wait_for()
    wait_for(lambda: page.locator(".tile .state").count() and "reading" not in page.locator(".tile").first.inner_text())
    wait_for(lambda: len(drawn_to(page, "Loss").split()) == 600)
    # The band between lowest and highest.
    wait_for(lambda: chart(page, "Loss").locator("polygon.band").count() == 1)
    # The axis reaches up to the bad step.
    wait_for(lambda: "80" in chart(page, "Loss").locator("text").all_text_contents())
    box = chart(page, "Loss").bounding_box()
    left, width = box["x"] + 0.55 * box["width"], 0.15 * box["width"]
    page.mouse.move(left, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(left + width, box["y"] + 40, steps=2)
    page.mouse.up()
    wait_for(lambda: page.evaluate("performance.getEntriesByType('resource').some(e => e.name.includes('from='))"))
    assert page.problems == []


def test_the_ranks_of_a_run_that_is_over_are_shown_to_the_last_step_however_many_there_are(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "wide")
    log(run, [10])
    with JsonlWriter(run.ranks) as ranks:
        for step in range(1, 801):
            own = [1.0 + 0.2 * (rank == 37) for rank in range(512)]
            ranks.write({"step": step, "time": 1.0, "stages": 1, "own_s": own})
    run.heartbeats.mkdir()
    for rank in range(512):
        phase = "data" if rank == 37 else "forward_backward"
        beat = f'{{"rank": {rank}, "host": "n{rank // 8}", "step": {9 if rank == 37 else 10}, "phase": "{phase}", "phase_s": 1.0}}'
        (run.heartbeats / f"{rank}.json").write_text(beat)
    page.goto(f"{dashboard.address}/#/runs?run=wide")
    page.reload()
    shown_whole(page)
    heat = page.locator('[data-card="Ranks over time"]')
    wait_for(lambda: heat.count() and re.search("to (799|800);", heat.inner_text()))
    now = page.locator('[data-card="Ranks now"]')
    # The rank furthest behind comes first.
    assert now.locator("tbody tr").first.inner_text().split()[:2] == ["37", "n4"]
    assert now.bounding_box()["height"] < 600
    assert page.problems == []


def test_tips_and_labels_stay_inside_their_chart_whatever_the_runs_are_called(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    names = [letter + "-very-long-name-of-a-run" * 2 for letter in "ab"]
    for name in names:
        log(make_run(tmp_path / "runs" / name), range(10, 1510, 10))
    page.goto(f"{dashboard.address}/#/runs?" + "&".join(f"run={quote(name)}" for name in names))
    page.reload()
    shown_whole(page)
    chart(page, "Loss").locator("polyline").first.wait_for()
    card = page.locator('[data-chart="Loss"]').bounding_box()
    for share in (0.2, 0.55, 0.95):
        page.mouse.move(card["x"] + share * card["width"], card["y"] + 90)
        tip = page.locator('[data-chart="Loss"] .tip').bounding_box()
        assert card["x"] <= tip["x"] <= tip["x"] + tip["width"] <= card["x"] + card["width"]
    box = chart(page, "Loss").bounding_box()
    for label in chart(page, "Loss").locator("text").all():
        written = label.bounding_box()
        assert box["x"] <= written["x"] <= written["x"] + written["width"] <= box["x"] + box["width"] + 0.5


def test_the_content_can_be_skipped_to_with_keys_and_a_run_that_is_deleted_says_so(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "sea")
    log(run, range(10, 100, 10))
    page.goto(f"{dashboard.address}/#/runs?run=sea")
    page.reload()
    shown_whole(page)
    chart(page, "Loss").locator("polyline").wait_for()
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/runs?run=sea")
    assert page.get_by_role("link", name="Runs").get_attribute("aria-current") == "page"
    shutil.rmtree(run.root)
    page.locator(".problem").wait_for()
    assert "there is no run" in page.locator(".problem").inner_text()
    # The run comes back without a reload.
    log(make_run(tmp_path / "runs" / "sea"), range(10, 300, 10))
    page.locator(".problem").wait_for(state="detached")
    wait_for(lambda: "290" in page.locator(".tiles").inner_text())


def test_a_chart_that_got_no_answer_is_asked_for_again_though_the_run_is_over(
    page: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    log(make_run(tmp_path / "runs" / "sea"), range(10, 100, 10))
    asked = []
    # The server answers after the first question of the chart has been lost.
    page.route(
        re.compile(r"/api/curves\?.*metric=loss"),
        lambda route: asked.append(route) or (route.abort() if len(asked) == 1 else route.continue_()),
    )
    page.goto(f"{dashboard.address}/#/runs?run=sea")
    page.reload()
    chart(page, "Loss").locator("polyline").wait_for()
    shown_whole(page)
    assert len(asked) > 1
    assert page.locator(".problem").count() == 0
    page.unroute_all()

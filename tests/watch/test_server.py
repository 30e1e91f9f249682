"""The dashboard's server: authentication, the API, and curves of long runs."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest

from argosy.record.jsonl import JsonlWriter
from argosy.watch.heat import HeatMap
from argosy.watch.series import Series
from argosy.watch.server import make_app
from record.run_dirs import log, make_run, record
from waiting import PATIENCE_S
from watch.conftest import TOKEN, Dashboard


def client(dashboard: Dashboard, token: str | None = TOKEN) -> httpx.Client:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=dashboard.address, headers=headers, timeout=PATIENCE_S)


def test_without_the_token_nothing_is_shown(dashboard: Dashboard) -> None:
    for token in (None, "wrong", TOKEN + "x", TOKEN[:-1]):
        with client(dashboard, token) as http:
            for path in ("/", "/api/runs", "/page/app.js", "/?token=wrong"):
                assert http.get(path).status_code == 401
    # The link sets the cookie.
    with httpx.Client(base_url=dashboard.address, timeout=PATIENCE_S) as http:
        assert http.get("/", params={"token": TOKEN}).status_code == 303
        assert http.get("/").status_code == 200
        cookie = http.get("/", params={"token": TOKEN}).headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie


def test_another_host_name_is_refused_so_that_no_page_elsewhere_can_ask(dashboard: Dashboard) -> None:
    with client(dashboard) as http:
        assert http.get("/api/runs", headers={"Host": "evil.example:80"}).status_code == 403


def test_pages_may_load_and_run_nothing_but_our_own_files(dashboard: Dashboard) -> None:
    with client(dashboard) as http:
        policy = http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_only_write_takes_the_token_and_json_and_stays_in_the_run(dashboard: Dashboard, tmp_path: Path) -> None:
    run, note = make_run(tmp_path / "runs" / "sea"), {"tags": ["a", "b", "a"], "note": "one"}
    make_run(tmp_path / "secret")
    with client(dashboard, None) as http:
        assert http.post("/api/note", params={"run": "sea"}, json=note).status_code == 401
    with client(dashboard) as http:
        # A form of another page can send text, but no JSON.
        form = {"Content-Type": "text/plain"}
        assert (
            http.post("/api/note", params={"run": "sea"}, content=orjson.dumps(note), headers=form).status_code == 415
        )
        assert http.get("/api/note", params={"run": "sea"}).status_code == 405
        for bad in ([], {"tags": "a", "note": ""}, {"tags": [1], "note": ""}, {"tags": ["a b"], "note": ""}):
            assert http.post("/api/note", params={"run": "sea"}, json=bad).status_code == 400
        too_long = {"tags": [], "note": "x" * (1 << 19)}
        assert http.post("/api/note", params={"run": "sea"}, json=too_long).status_code == 413
        assert http.post("/api/note", params={"run": "../secret"}, json=note).status_code == 404
        assert not list(tmp_path.rglob("notes.json"))
        # A link in its place is replaced, not followed.
        (run.root / "notes.json").symlink_to(tmp_path / "elsewhere")
        assert http.post("/api/note", params={"run": "sea"}, json=note).json() == {"tags": ["a", "b"], "note": "one"}
        assert not (tmp_path / "elsewhere").exists()
        assert [row["tags"] for row in http.get("/api/runs").json()] == [["a", "b"]]


def test_a_run_with_a_strangers_spec_does_not_break_the_list_of_all_runs(dashboard: Dashboard, tmp_path: Path) -> None:
    log(make_run(tmp_path / "runs" / "sea"), [10])
    deep = '{"a":' * 900 + "1" + "}" * 900
    for number, spec in enumerate([deep, "3", '{"model": {"layers": 1e99}}', '{"model": []}', '{"optim": {"lr": {}}}']):
        (tmp_path / "runs" / f"odd-{number}").mkdir()
        (tmp_path / "runs" / f"odd-{number}" / "resolved.json").write_text(f'{{"spec": {spec}, "origins": {{"a": 1}}}}')
    with client(dashboard) as http:
        assert len(http.get("/api/runs").json()) == 6
        assert len(http.get("/api/table").json()["runs"]) == 6


def test_an_x_axis_of_tokens_or_time_is_exact_and_never_falls(tmp_path: Path) -> None:
    path, billion = tmp_path / "metrics.jsonl", 10**9
    with JsonlWriter(path) as metrics:
        for step in range(1, 6):
            # The machine that resumed the run at step 4 has a clock that is behind.
            clock = 1_700_000_000.25 + step - (100 if step > 3 else 0)
            metrics.write(
                {
                    "step": 10 * step,
                    "time": clock,
                    "tokens": 70 * billion + step,
                    "loss": 1.0,
                    "spent": {"startup": 5.0},
                }
            )
        metrics.write({"step": 55, "validation_loss": 2.0})
    series = Series(path)
    series.update()
    by_tokens = series.curves(["loss", "validation_loss"], axis="tokens")
    assert by_tokens["loss"]["x"] == [70 * billion + step for step in range(1, 6)]
    # A record without tokens is placed by its step.
    assert by_tokens["validation_loss"]["x"] == [70 * billion + 5]
    assert series.curves(["loss"], axis="tokens", first=70 * billion + 3, last=70 * billion + 4)["loss"]["step"] == [
        20,
        30,
        40,
        50,
    ]
    assert series.curves(["loss"], axis="time")["loss"]["x"] == [5.0, 6.0, 7.0, 7.0, 7.0]
    with pytest.raises(ValueError, match="one of step, tokens, time"):
        series.curves(["loss"], axis="moon")


@pytest.mark.parametrize(
    "name", ["../secret", "..", "/etc", "sea/../../secret", "sea/checkpoints", "%2e%2e/secret", "\x00"]
)
def test_no_name_leads_out_of_the_root(dashboard: Dashboard, tmp_path: Path, name: str) -> None:
    log(make_run(tmp_path / "runs" / "sea"), [10])
    log(make_run(tmp_path / "secret"), [10])
    with client(dashboard) as http:
        assert http.get("/api/run", params={"run": name}).status_code == 404
        assert http.get("/page/..%2f..%2fserver.py").status_code == 404
        assert http.get("/page/%2e%2e/server.py").status_code in (404, 400)


def test_every_address_of_the_api_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "watching.md").read_text()
    served = {
        route.path for route in make_app(tmp_path, "t").routes if getattr(route, "methods", None) == {"GET", "HEAD"}
    }
    # The choices are those of the planner's form.
    assert set(re.findall(r"/api/\w+", page)) == {path for path in served if path.startswith("/api/")} - {
        "/api/choices"
    }


ODD = [
    {"global_batch": "-3"}, {"global_batch": "0"}, {"global_batch": "1e3"}, {"global_batch": "9" * 5000}, {"seq_len": "x"}, {"price": "nan"},
    {"price": "-1"}, {"price": "1e400"}, {"cluster": "99999999xH100"}, {"cluster": "00xH100"}, {"tokens": "-5B"}, {"spot": "1.5"}, {"within": "soon"}, {"model": "../x"},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:40])
def test_the_planner_refuses_an_odd_question_with_a_reason_and_a_fix(odd: dict[str, str], dashboard: Dashboard) -> None:
    with client(dashboard) as http:
        reply = http.get("/api/plan", params={"model": "llama2-7b", "cluster": "8xH100"} | odd)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"]
    assert reply.json()["error"]["fix"]


def test_the_planner_reads_no_files(dashboard: Dashboard, tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text("model: gpt2")
    with client(dashboard) as http:
        reply = http.get("/api/plan", params={"model": str(spec), "cluster": "8xH100"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "config.unknown-preset"


def test_the_planner_reads_the_spec_of_a_run_that_is_shown_and_of_no_other(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "sea")
    log(run, [10])
    log(make_run(tmp_path / "secret"), [10])
    with client(dashboard) as http:
        assert "run:sea" in http.get("/api/choices").json()["models"]
        found = http.get("/api/plan", params={"model": "run:sea"}).json()
        assert http.get("/api/plan", params={"model": "run:../secret"}).status_code == 404
    spec = run.load_spec()
    assert found["tokens_from"] == "the run spec's length"
    assert (found["global_batch"], found["seq_len"]) == (spec.train.global_batch, spec.data.seq_len)
    assert found["asked"]["parallel"]


def test_a_long_run_comes_in_as_many_pieces_as_there_is_room_for_and_whole_when_zoomed(tmp_path: Path) -> None:
    path, count = tmp_path / "metrics.jsonl", 50_000
    with path.open("w") as file:
        for step in range(1, count + 1):
            file.write(f'{{"step": {step}, "loss": {9.5 if step == 31_007 else 2 + step % 7}}}\n')
    series = Series(path)
    series.update()
    assert series.count == count
    curve = series.curves(["loss"], pieces=500)["loss"]
    assert len(curve["step"]) == 500
    # A single bad step is not averaged away.
    assert max(curve["high"]) == 9.5
    assert min(curve["low"]) == 2
    near = series.curves(["loss"], first=31_000, last=31_014, pieces=500)["loss"]
    assert dict(zip(near["step"], near["mean"], strict=True))[31_007] == 9.5
    # One point beyond each edge.
    assert len(near["step"]) == 17


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "again")
    log(run, range(10, 60, 10))
    series = Series(run.metrics)
    series.update()
    log(run, range(30, 50, 10), loss=1.5)
    with JsonlWriter(run.metrics) as metrics:
        metrics.write({"step": 40, "validation_loss": 3.0})
    series.update()
    curves = series.curves(["loss", "validation_loss"])
    assert curves["loss"]["step"] == [10, 20, 30, 40]
    assert curves["loss"]["mean"][-1] == 1.5
    assert curves["validation_loss"]["step"] == [40]


def test_another_run_that_took_the_place_of_one_is_shown_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sea")
    log(run, range(10, 60, 10), loss=9.0)
    series = Series(run.metrics)
    series.update()
    run.root.rename(tmp_path / "sea.old-1")
    run = make_run(tmp_path / "sea")
    # Longer than the file before, at the next look.
    log(run, range(10, 200, 10), loss=1.5)
    series.update()
    assert set(series.curves(["loss"])["loss"]["mean"]) == {1.5}
    assert series.count == 19


def test_nonsense_in_the_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        "[1]",
        '{"step": "x"}',
        '{"step": -5, "loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": 99999999999999999999, "loss": 1}',
        "nope",
        '{"step": 3, "loss": NaN}',
        '{"step": 4, "loss": 1e999}',
        '{"step": 5, "loss": 2.5, "": 3}',
    ]
    path.write_text("\n".join(lines) + "\n")
    series = Series(path)
    series.update()
    assert series.curves(["loss"])["loss"]["step"] == [5]


def test_curves_are_those_of_the_file_however_it_is_cut_into_reads(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(1), tmp_path / "metrics.jsonl"
    whole = b"".join(orjson.dumps(record(step)) + b"\n" for step in range(1, 60))
    series, at = Series(path), 0
    path.touch()
    while at < len(whole):
        more = int(rng.integers(1, 900))
        with path.open("ab") as file:
            file.write(whole[at : at + more])
        at += more
        series.update()
    assert series.curves(["loss"])["loss"]["step"] == list(range(1, 60))


def test_the_heat_map_of_many_ranks_and_logs_is_small_and_keeps_the_worst_of_each_cell(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    with JsonlWriter(path) as ranks:
        for step in range(1, 1301):
            own = [1.0] * 700
            if step == 777:
                own[333] = 3.0
            ranks.write({"step": step, "time": 1.0, "stages": 1, "own_s": own, "memory_gib": [None] * 700})
    heat = HeatMap(path)
    heat.update()
    picture = heat.picture()
    cells = np.array(picture["cells"])
    assert cells.shape == (len(picture["steps"]), len(picture["ranks"]))
    assert cells.shape[0] <= 480
    assert cells.shape[1] <= 256
    assert np.count_nonzero(cells > 2.9) == 1
    across, down = np.argwhere(cells > 2.9)[0]
    assert picture["steps"][across] <= 777 < picture["steps"][across + 1]
    assert picture["ranks"][down] <= 333 < picture["ranks"][down + 1]
    assert np.isnan(heat.picture("memory_gib")["cells"]).all()


def test_the_heat_map_drops_what_a_resumed_run_did_again_and_the_ranks_of_another_layout(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"

    def write(steps: range, own: list[float]) -> list[int]:
        with JsonlWriter(path) as ranks:
            for step in steps:
                ranks.write({"step": step, "time": 1.0, "stages": 1, "own_s": own})
        heat.update()
        return list(heat.picture()["steps"])

    heat = HeatMap(path)
    assert write(range(10, 60, 10), [1.0, 2.0]) == [10, 20, 30, 40, 50]
    assert write(range(30, 50, 10), [2.0, 1.0]) == [10, 20, 30, 40]
    assert heat.picture()["cells"] == [[0.5, 2.0], [0.5, 2.0], [2.0, 0.5], [2.0, 0.5]]
    assert write(range(50, 60, 10), [1.0, 1.0, 1.0]) == [50]
    assert HeatMap(tmp_path / "none").picture()["cells"] == []


def test_the_end_of_a_ranks_log_is_shown_as_plain_text(dashboard: Dashboard, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "sea")
    log(run, [10])
    (run.root / "logs/2").mkdir(parents=True)
    (run.root / "logs/2/11.log").write_text(
        "".join(f"line {i}\n" for i in range(9000)) + "\x1b[31mred\x1b[0m \x07bell\n"
    )
    (run.root / "logs/2/3.log").write_text("three\n")
    with client(dashboard) as http:
        found = http.get("/api/log", params={"run": "sea", "rank": 11}).json()
        assert (found["ranks"], found["path"], len(found["lines"])) == ([3, 11], "logs/2/11.log", 200)
        assert found["lines"][-2:] == ["line 8999", "red \ufffdbell"]
        assert http.get("/api/log", params={"run": "sea", "rank": 4}).json()["lines"] == []
        assert http.get("/api/log", params={"run": "sea", "rank": "../../3"}).status_code == 400

"""The dashboard's server: pages and JSON about the runs under a root, for this machine and for holders of the token.

It reads, and writes one thing: the tags and the note of a run (`/api/note`). The Host header must be 127.0.0.1 or localhost, which stops DNS rebinding by other web pages. The token must be
in a cookie, set by the first link, or in a header. A browser sends the cookie only from our own pages (SameSite=Strict), and a
write must be JSON, which a form of another page cannot send. The content security policy allows only our own files and scripts, so that
the name of a run or metric can never become code.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from argosy.errors import ArgosyError
from argosy.record.run_notes import RunNotes, read_notes, write_notes
from argosy.watch.curve_csv import curve_csv
from argosy.watch.diagnosis import diagnose
from argosy.watch.facts import comparison, config_diff, config_rows, predicted, waterfall
from argosy.watch.finding import FINE, STATES
from argosy.watch.heat import RATIO
from argosy.watch.log_causes import end_of_log
from argosy.watch.planner_answers import choices, plan
from argosy.watch.reading import table
from argosy.watch.run_list import Run, find_runs

PAGE = Path(__file__).parent / "page"
COOKIE = "argosy_token"
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_LOOK_EVERY_S = 2.0
_MOST_PIECES = 2000
# Bytes of a run's logs that are read for a page.
_LOG_BYTES = 16 << 20
# Seconds that an answer waits for a diagnosis. Without one by then, the last one is sent.
_VERDICT_S = 0.15
# Bytes of a request's body.
_MOST_BODY = 1 << 18


class RunCache:
    """The runs found under the root. The list is refreshed every 2 seconds, and metrics are read in threads."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        self._runs: dict[str, Run] = {}
        self._looked = float("-inf")

    def runs(self) -> dict[str, Run]:
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_EVERY_S:
                found = find_runs(self._root)
                self._runs = {name: self._runs.get(name) or Run(name, path) for name, path in found.items()}
                self._looked = time.monotonic()
            return self._runs

    def get(self, name: str) -> Run:
        run = self.runs().get(name)
        # The run may have just started.
        if run is None:
            self._looked = float("-inf")
            run = self.runs().get(name)
        if run is None:
            raise ArgosyError("run.not-found", f"there is no run {name!r} here", fix="go back to the list of runs")
        return self.fresh(run)

    def all_fresh(self, within_s: float = 0.1) -> list[Run]:
        """Return all runs, updated as far as time allows. With many long files, the next request finds more of them read."""
        deadline, runs = time.monotonic() + within_s, list(self.runs().values())
        for run in runs:
            if time.monotonic() < deadline:
                self.fresh(run, 0.02)
        return runs

    def fresh(self, run: Run, within_s: float = 0.05) -> Run:
        """Update a run from its file. A long file is read on in the background."""
        _in_background(run.series.update, within_s)
        return run


def _in_background(update: Callable[[], None], within_s: float) -> None:
    reader = threading.Thread(target=update, daemon=True)
    reader.start()
    reader.join(within_s)


class Verdict:
    """The newest diagnosis of a run. With thousands of logs one takes seconds: the next begins after ten times as long."""

    def __init__(self) -> None:
        self._lock, self._due = threading.Lock(), float("-inf")
        self.found: list[dict[str, Any]] = []

    def update(self, run: Run) -> None:
        """Diagnose the run again if that is due, and no other thread does."""
        if time.monotonic() < self._due or not self._lock.acquire(blocking=False):
            return
        began = time.monotonic()
        try:
            found = [] if run.state() == "done" else diagnose(run, read_bytes=_LOG_BYTES)
            shown = [one for one in found if one.weight > FINE and (one.name not in STATES or one.fix)]
            self.found = [finding.as_dict() for finding in shown][:4]
        finally:
            self._due = time.monotonic() + 10 * (time.monotonic() - began) - _VERDICT_S
            self._lock.release()


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, default=str, option=orjson.OPT_NON_STR_KEYS)


class RunApi:
    """The answers of the dashboard's API, from the run directories below one root."""

    def __init__(self, root: Path, *, copied: bool = False) -> None:
        self._cache, self._copied = RunCache(root), copied
        self._verdicts: dict[Path, Verdict] = {}

    def runs(self, request: Request) -> Any:
        return [run.summary() for run in self._cache.all_fresh()]

    def run(self, request: Request) -> Any:
        run = self._named(request)
        return run.summary() | {
            "names": run.series.names(),
            "waterfall": waterfall(run.series.last),
            "events": run.events()[-500:],
            "checkpoints": run.checkpoints(),
            "heartbeats": list(run.heartbeats().values())[:512],
            "predicted": predicted(run),
        }

    def curves(self, request: Request) -> Any:
        query = request.query_params
        pieces = min(_MOST_PIECES, max(10, int(query.get("pieces", 600))))
        return {
            run.name: {
                "version": run.series.version,
                "curves": run.series.curves(query.getlist("metric"), pieces=pieces, **_shown(query)),
            }
            for run in self._several(request)
        }

    def csv(self, request: Request) -> Response:
        query = request.query_params
        text = curve_csv(self._several(request), query.getlist("metric"), **_shown(query))
        headers = {"Content-Disposition": 'attachment; filename="argosy.csv"'}
        return Response(text, media_type="text/csv; charset=utf-8", headers=headers)

    def table(self, request: Request) -> Any:
        return comparison(self._cache.all_fresh())

    def samples(self, request: Request) -> Any:
        return [{"run": run.name, **sample} for run in self._several(request) for sample in run.samples()]

    def note(self, request: Request, body: Any) -> Any:
        run, (tags, note) = self._named(request), (table(body).get(key) for key in ("tags", "note"))
        if not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) and isinstance(note, str)):
            raise ValueError("a note is an object with `tags`, a list of texts, and `note`, a text")
        if self._copied:
            raise ArgosyError(
                "run.unwritable",
                "this is a copy of a run in a cluster, where nothing is written",
                fix="write the note where the volume is mounted: `argosy note RUN TEXT`",
            )
        write_notes(run.root, RunNotes().tagged(tags).with_note(note))
        return read_notes(run.root).as_dict()

    def ranks(self, request: Request) -> Any:
        heat = self._named(request).heat
        _in_background(heat.update, 0.05)
        return heat.picture(request.query_params.get("column", RATIO)) | {"reading": heat.reading}

    def verdict(self, request: Request) -> Any:
        run = self._named(request)
        verdict = self._verdicts.setdefault(run.root, Verdict())
        _in_background(partial(verdict.update, run), _VERDICT_S)
        return verdict.found

    def log(self, request: Request) -> Any:
        return end_of_log(self._named(request), int(request.query_params.get("rank", 0)))

    def config(self, request: Request) -> Any:
        return config_rows(self._named(request))

    def diff(self, request: Request) -> Any:
        return config_diff(self._several(request))

    def plan(self, request: Request) -> Any:
        return plan(request.query_params, self._cache.get)

    def choices(self, request: Request) -> Any:
        return choices(list(self._cache.runs().values()))

    def _named(self, request: Request) -> Run:
        return self._cache.get(request.query_params.get("run", ""))

    def _several(self, request: Request) -> list[Run]:
        return [self._cache.get(name) for name in request.query_params.getlist("run")]


def _shown(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the x axis of a request, and the part of it that is wanted."""
    first, last = (float(query[key]) if query.get(key) else None for key in ("from", "to"))
    return {"axis": query.get("x") or "step", "first": first, "last": last}


def make_app(root: Path, token: str, *, copied: bool = False) -> Starlette:
    """Build the dashboard's web application for the run directories below `root`. Nothing is written into a copy of runs."""
    api = RunApi(root, copied=copied)
    answers = (
        api.runs, api.run, api.curves, api.csv, api.table, api.samples, api.ranks, api.verdict, api.log, api.config, api.diff,
        api.plan, api.choices,
    )  # fmt: skip
    pages = [Route("/", _file("index.html")), Route("/page/{name}", _static)]
    reads = [Route(f"/api/{answer.__name__}", _answers(answer)) for answer in answers]
    app = Starlette(routes=[*pages, *reads, Route("/api/note", _takes(api.note), methods=["POST"])])
    app.add_middleware(BaseHTTPMiddleware, dispatch=_guard(token))
    return app


def _answers(function: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that answers with a function's result, or with its refusal, as JSON."""

    async def endpoint(request: Request) -> Response:
        return await _reply(function, request)

    return endpoint


def _takes(function: Callable[[Request, Any], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that hands the JSON body of a request to a function."""

    async def endpoint(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return Json({"error": {"cause": "only JSON is taken here"}}, status_code=415)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BODY:
                return Json({"error": {"cause": f"more than {_MOST_BODY:,} bytes"}}, status_code=413)
        return await _reply(lambda asked: function(asked, orjson.loads(body)), request)

    return endpoint


async def _reply(function: Callable[[Request], Any], request: Request) -> Response:
    try:
        found = await run_in_threadpool(function, request)
        return found if isinstance(found, Response) else Json(found)
    except ArgosyError as error:
        return Json({"error": error.as_dict()}, status_code=404 if error.code == "run.not-found" else 400)
    except (ValueError, OverflowError) as error:
        return Json({"error": {"cause": str(error)}}, status_code=400)


def _guard(token: str) -> Callable[[Request, Any], Awaitable[Response]]:
    """Return the middleware that checks host and token, and sets the security headers."""

    async def dispatch(request: Request, call: Any) -> Response:
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            return Response("this page answers to 127.0.0.1 and localhost only", 403)
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and secrets.compare_digest(given.encode(), token.encode()):
            rest = urlencode([(k, v) for k, v in request.query_params.multi_items() if k != "token"])
            reply: Response = RedirectResponse("/" + (f"?{rest}" if rest else ""), 303)
            reply.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return reply
        carried = request.cookies.get(COOKIE) or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(carried.encode(), token.encode()):
            return Response("open the link that `argosy dash` printed: it holds the token", 401)
        reply = await call(request)
        reply.headers["Content-Security-Policy"] = _POLICY
        reply.headers["X-Content-Type-Options"] = "nosniff"
        reply.headers["Referrer-Policy"] = "no-referrer"
        reply.headers["Cache-Control"] = "no-store"
        return reply

    return dispatch


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return FileResponse(PAGE / name)

    return endpoint


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in {path.name for path in PAGE.iterdir()}:
        return Response("no such file", 404)
    return FileResponse(PAGE / name)

"""A Kubernetes API server on loopback, as far as a launch uses one: discovery, server-side apply with strict fields, get, list by
label, watch, logs, delete. It stores objects and nothing acts on them: tests play the operators by changing what is stored.
`test_api_recordings.py` holds its answers to those of real servers."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections import defaultdict
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from api_rules import (
    CLUSTER_WIDE,
    CORE,
    DISCOVERY,
    KINDS,
    ONLY,
    OWNERS,
    VERBS,
    Asked,
    chooser,
    conflict,
    deletion,
    document_fault,
    field_fault,
    what_is_asked,
)
from api_statuses import failure, forbidden, not_found, unknown_resource
from api_store import ConflictingFields, Object, ObjectStore

_USER = "argosy-test"


class ApiServer(ObjectStore):
    """The server. `faults` are statuses to answer next; the sets say what the cluster lacks or denies."""

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__()
        self.tokens = {"loopback-token"}
        self.last_token = ""
        self.logs: dict[str, list[str]] = defaultdict(list)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.faults: list[int] = []
        self.unknown: set[str] = set()  # plurals whose operator is not installed
        self.forbidden: set[str] = set()  # plurals this user has no right to
        self.denied: set[tuple[str, str]] = set()  # (verb, plural) that a review of this user's rights denies
        self.any_claim = True  # every PersistentVolumeClaim that is asked for is there
        self.missing_fields: set[str] = set()  # those an operator of the cluster is too old for
        self.namespaces: set[str] | None = None  # those there are; None: any
        self.lingers_s = 0.0  # seconds that pods take to end, and a job that goes after them
        self.cut_logs_after: int | None = None  # lines after which a log's connection is cut, once
        self.proxies: dict[str, int] = {}  # "POD:PORT" to the loopback port that plays its server
        outer = self

        class Handler(_Handler):
            server_state = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "http"
        if certificate is not None:  # with its key in the same file
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_config(self, path: Path, namespace: str = "training") -> Path:
        """A kubeconfig as kubectl has it."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "loopback-token"}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path


class _Handler(BaseHTTPRequestHandler):
    server_state: ApiServer
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: with Nagle's algorithm the second waits 40 ms for the client's delayed ACK.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None: ...

    def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        text = isinstance(document, str)
        body = document.encode() if text else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8" if text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, document: Object) -> None:
        self._answer(document["code"], document)

    def _begin(self, verb: str) -> Asked | None:
        """Return what is asked for, or answer a request that is about no object, or that goes wrong before it gets there."""
        state, path = self.server_state, urlsplit(self.path).path
        found = DISCOVERY.fullmatch(path)
        asked = None if found else what_is_asked(self.path)
        state.requests.append((self.command, path, {} if asked is None else asked.query))
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        state.last_token = token
        if scheme.lower() != "bearer" or token not in state.tokens:
            return self._refuse(failure(401, "Unauthorized"))
        if state.faults:
            return self._stumble(state.faults.pop(0))
        if asked is None:
            return self._discover(path.strip("/"))
        if asked.plural in state.unknown or asked.kind is None:
            return self._refuse(unknown_resource())
        other = self.headers.get("Impersonate-User")
        if (other or asked.plural in state.forbidden) and asked.plural != "selfsubjectaccessreviews":
            resource = asked.plural if asked.part is None else f"{asked.plural}/{asked.part}"
            said = forbidden(other or _USER, verb, asked.group, resource, asked.name, asked.namespace)
            return self._refuse(said)
        return asked

    def _stumble(self, fault: int) -> None:
        if fault == 0:
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(fault, failure(fault, "injected"), {"Retry-After": "0"} if fault == 429 else None)

    def _discover(self, path: str) -> None:
        """Which groups there are, or what is in one; an operator that is not installed has brought neither."""
        state = self.server_state
        known = {v: [pair for pair in pairs if pair[1] not in state.unknown] for v, pairs in KINDS.items()}
        known = {version: pairs for version, pairs in known.items() if pairs}
        if path == "version":
            return self._answer(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
        if path == "apis":
            groups = [version.split("/") for version in known if "/" in version]
            versions = [(group, {"groupVersion": f"{group}/{v}", "version": v}) for group, v in groups]
            listed = [{"name": group, "versions": [v], "preferredVersion": v} for group, v in versions]
            return self._answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        version = path.partition("/")[2]
        if version not in known:
            return self._answer(404, "404 page not found\n")
        resources = [
            {
                "name": p,
                "singularName": "",
                "namespaced": k not in CLUSTER_WIDE,
                "kind": k,
                "verbs": ONLY.get(p, VERBS),
            }
            for k, p in known[version]
        ]
        self._answer(200, {"kind": "APIResourceList", "groupVersion": version, "resources": resources})

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = self._begin("patch")
        if asked is None:
            return
        document = json.loads(body)
        if self.headers["Content-Type"] == "application/merge-patch+json":
            return self._merge(asked, document)
        if self.headers["Content-Type"] != "application/apply-patch+yaml" or "fieldManager" not in asked.query:
            return self._refuse(failure(415, "not a server-side apply"))
        fault = self._fault(asked, document)
        if fault is not None:
            return self._refuse(fault)
        try:
            dry = asked.query.get("dryRun") == "All"
            force = asked.query.get("force") == "true"
            made, result = self.server_state.apply(
                asked.plural, document, asked.query["fieldManager"], force=force, keep=not dry
            )
        except ConflictingFields as error:
            return self._refuse(conflict(error))
        self._answer(201 if made else 200, result)

    def _fault(self, asked: Asked, document: Object) -> Object | None:
        state = self.server_state
        if state.namespaces is not None and asked.namespace not in state.namespaces:
            return not_found("", "namespaces", asked.namespace)
        return document_fault(asked, document, state.missing_fields, state.objects.get((asked.plural, str(asked.name))))

    def _merge(self, asked: Asked, changes: Object) -> None:
        document = self.server_state.objects.get((asked.plural, str(asked.name)))
        if document is None:
            return self._refuse(not_found(asked.group, asked.plural, str(asked.name)))
        marks = document["metadata"].get("annotations", {}) | changes["metadata"]["annotations"]
        metadata = document["metadata"] | {
            "annotations": {key: value for key, value in marks.items() if value is not None}
        }
        if not metadata["annotations"]:
            del metadata["annotations"]
        changed = document | {"metadata": metadata}
        self.server_state.put(asked.plural, changed)
        self._answer(200, changed)

    def do_POST(self) -> None:
        """A review of a right, the one thing that is created and not applied."""
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._begin("create") is None:
            return
        of = review["spec"]["resourceAttributes"]
        resource = "/".join(part for part in (of["resource"], of["subresource"]) if part)
        allowed = (of["verb"], resource) not in self.server_state.denied and "Impersonate-User" not in self.headers
        self._answer(201, review | {"status": {"allowed": allowed}})

    def do_DELETE(self) -> None:
        asked = self._begin("delete")
        if asked is None:
            return
        state, name = self.server_state, str(asked.name)
        gone = state.remove(asked.plural, name)
        if gone is None:
            return self._refuse(not_found(asked.group, asked.plural, name))
        # A job's pods go with it.
        mine = gone["metadata"].get("labels", {})
        own = {key: mine[key] for key in ("argosy/run", "argosy/stage") if key in mine}
        owned = [key for key in state.objects if key[0] == "pods" and asked.plural in OWNERS and len(own) == 2]
        ending = [key for key in owned if own.items() <= state.objects[key]["metadata"]["labels"].items()]
        if asked.plural in OWNERS and state.lingers_s and asked.query.get("propagationPolicy") == "Foreground":
            state.put(asked.plural, deletion(asked, gone))
            ending.append((asked.plural, name))
        for key in ending:
            threading.Timer(state.lingers_s, state.remove, key).start() if state.lingers_s else state.remove(*key)
        self._answer(200, deletion(asked, gone))

    def do_GET(self) -> None:
        watched = "watch=true" in self.path
        listed = (
            not watched and not DISCOVERY.fullmatch(urlsplit(self.path).path) and what_is_asked(self.path).name is None
        )
        asked = self._begin("watch" if watched else "list" if listed else "get")
        if asked is None:
            return
        if asked.part == "proxy":
            return self._proxy(asked)
        if asked.part == "log":
            return self._log(asked)
        if watched:
            return self._watch(asked)
        if asked.name is not None:
            document = self.server_state.objects.get((asked.plural, asked.name))
            if asked.plural == "persistentvolumeclaims" and self.server_state.any_claim:
                document = document or {"metadata": {"name": asked.name}, "status": {"phase": "Bound"}}
            return (
                self._answer(200, document)
                if document
                else self._refuse(not_found(asked.group, asked.plural, asked.name))
            )
        fault = field_fault(asked)
        if fault is not None:
            return self._refuse(fault)
        chosen = chooser(asked)
        items = [
            document for (kind, _), document in self.server_state.objects.items()
            if kind == asked.plural and document["metadata"].get("namespace") in (None, asked.namespace)
        ]  # fmt: skip
        unnamed = ("kind", "apiVersion") if asked.api_version in CORE else ()
        items = [{key: value for key, value in item.items() if key not in unnamed} for item in items if chosen(item)]
        head = {"kind": f"{asked.kind}List", "apiVersion": asked.api_version}
        metadata = ({} if asked.api_version in CORE else {"continue": ""}) | {
            "resourceVersion": str(self.server_state.version)
        }
        self._answer(200, head | {"metadata": metadata, "items": items})

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _watch(self, asked: Asked) -> None:
        state, seen, chosen = self.server_state, int(asked.query.get("resourceVersion") or 0), chooser(asked)
        self._stream()
        deadline = time.monotonic() + min(1.0, float(asked.query.get("timeoutSeconds", "1")))
        while time.monotonic() < deadline:
            with state.changed:
                if state.version == seen:
                    state.changed.wait(0.1)
                fresh = [change for change in state.history if change[0] > seen and change[2] == asked.plural]
                seen = state.version
            for _, kind, _, document in fresh:
                if chosen(document):
                    self._chunk(json.dumps({"type": kind, "object": document}) + "\n")
        self._chunk("")

    def _proxy(self, asked: Asked) -> None:
        """Pass a request on to the server of a pod, without the user's own credentials."""
        state, (pod, _, number) = self.server_state, str(asked.name).partition(":")
        if ("pods", pod) not in state.objects and f"{pod}:{number}" not in state.proxies:
            return self._refuse(not_found("", "pods", pod))
        port = state.proxies.get(f"{pod}:{number}")
        if port is None:
            return self._refuse(failure(400, "address not allowed"))
        kept = {key: value for key, value in self.headers.items() if key.lower() not in ("authorization", "host")}
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/" + self.path.partition("/proxy/")[2], headers=kept)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _log(self, asked: Asked) -> None:
        state, name, query = self.server_state, str(asked.name), asked.query
        if ("pods", name) not in state.objects:
            return self._refuse(not_found("", "pods", name))
        if not state.logs[name]:
            # No node has the pod yet, or its container wrote nothing.
            self.send_response(204)
            return self.end_headers()
        since = query.get("sinceTime", "")
        lines = [line for line in state.logs[name] if line.split(" ", 1)[0] >= since]
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :]
        self._stream()
        for number, line in enumerate(lines):
            if state.cut_logs_after == number:
                state.cut_logs_after = None
                self.close_connection = True
                self.connection.close()
                return
            self._chunk(line + "\n")
        self._chunk("")

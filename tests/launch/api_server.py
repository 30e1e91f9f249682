"""A Kubernetes API server on loopback, as far as a launch uses one: discovery, server-side apply with strict fields, get, list by
label, watch, logs, delete. It stores objects and nothing acts on them: tests play the operators by changing what is stored."""

from __future__ import annotations

import json
import re
import ssl
import threading
import time
from collections import defaultdict
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml
from crds import HYPERPOD_JOB, JOB_SET, check_strictly

Object = dict[str, Any]
DISCOVERY = re.compile(r"/version|/apis(/[^/]+/[^/]+)?|/api/v1")
OPERATORS = {"jobsets": JOB_SET, "hyperpodpytorchjobs": HYPERPOD_JOB}
# Group and version to (kind, plural). Kinds in CLUSTER_WIDE have no namespace.
KINDS = {
    "v1": [
        ("ConfigMap", "configmaps"),
        ("Event", "events"),
        ("PersistentVolume", "persistentvolumes"),
        ("PersistentVolumeClaim", "persistentvolumeclaims"),
        ("Pod", "pods"),
        ("Pod", "pods/log"),
        ("Service", "services"),
    ],
    "storage.k8s.io/v1": [("StorageClass", "storageclasses")],
    "authorization.k8s.io/v1": [("SelfSubjectAccessReview", "selfsubjectaccessreviews")],
    "kueue.x-k8s.io/v1beta1": [("LocalQueue", "localqueues")],
    "batch/v1": [("Job", "jobs")],
    "jobset.x-k8s.io/v1alpha2": [("JobSet", "jobsets")],
    "kubeflow.org/v1": [("PyTorchJob", "pytorchjobs")],
    "trainer.kubeflow.org/v1alpha1": [("TrainJob", "trainjobs"), ("TrainingRuntime", "trainingruntimes")],
    "sagemaker.amazonaws.com/v1": [("HyperPodPyTorchJob", "hyperpodpytorchjobs")],
    "resource.nvidia.com/v1beta1": [("ComputeDomain", "computedomains")],
    "scheduling.volcano.sh/v1beta1": [("PodGroup", "podgroups")],
    "scheduling.x-k8s.io/v1alpha1": [("PodGroup", "podgroups")],
}
CLUSTER_WIDE = ("PersistentVolume", "StorageClass", "SelfSubjectAccessReview")


class ApiServer:
    """`objects[(plural, name)]` is what the cluster holds; `faults` are statuses to answer next; `dropped` watches are cut."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.token = "loopback-token"
        self.objects: dict[tuple[str, str], Object] = {}
        self.logs: dict[str, list[str]] = defaultdict(list)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.faults: list[int] = []
        self.unknown: set[str] = set()  # plurals whose operator is not installed
        self.forbidden: set[str] = set()  # plurals this user has no right to
        self.denied: set[tuple[str, str]] = set()  # (verb, plural) that a review of this user's rights denies
        self.any_claim = True  # every PersistentVolumeClaim that is asked for is there
        self.missing_fields: set[str] = set()  # those an operator of the cluster is too old for
        self.namespaces: set[str] | None = None  # those there are; None: any
        self.cut_logs_after: int | None = None  # lines after which a log's connection is cut, once
        self.proxies: dict[str, int] = {}  # "POD:PORT" to the loopback port that plays its server
        self.changed = threading.Condition()
        self.version = 1
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

    def put(self, plural: str, document: Object) -> None:
        """What an operator or the kubelet would write."""
        with self.changed:
            self.version += 1
            document["metadata"]["resourceVersion"] = str(self.version)
            self.objects[plural, document["metadata"]["name"]] = document
            self.changed.notify_all()

    def condition(self, plural: str, name: str, kind: str, **more: str) -> None:
        document = self.objects[plural, name]
        status = document.setdefault("status", {})
        status["conditions"] = [{"type": kind, "status": "True", **more}]
        self.put(plural, document)

    def pod(self, name: str, *, run: str, stage: str, index: int = 0, **status: Any) -> None:
        labels = {"argosy/run": run, "argosy/stage": stage, "batch.kubernetes.io/job-completion-index": str(index)}
        container = {"name": "argosy", "resources": {"limits": {"memory": "8Gi"}}}
        volumes = [{"name": "storage", "persistentVolumeClaim": {"claimName": "fsx-shared-pvc"}}]
        spec = {"containers": [container], "volumes": volumes, "nodeName": f"node-{index}"}
        metadata = {"name": name, "labels": labels, "annotations": {"argosy/ranks": "8"}}
        self.put("pods", {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status})

    def event(self, about: str, reason: str, message: str) -> None:
        document = {"metadata": {"name": f"{about}.{self.version}"}, "type": "Warning", "reason": reason}
        self.put("events", document | {"message": message, "involvedObject": {"name": about}})


class _Handler(BaseHTTPRequestHandler):
    server_state: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def _split(self) -> tuple[str, str | None, str | None, dict[str, str]]:
        """(plural, name, subresource, query)"""
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        words = parts.path.strip("/").split("/")
        if "namespaces" in words:
            rest = words[words.index("namespaces") + 2 :]
        else:
            rest = words[2:] if words[0] == "api" else words[3:]
        return rest[0], (rest[1:] or [None])[0], (rest[2:] or [None])[0], query  # type: ignore[return-value]

    def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _begin(self) -> tuple[str, str | None, str | None, dict[str, str]] | None:
        state = self.server_state
        path = urlsplit(self.path).path
        found = DISCOVERY.fullmatch(path)
        plural, name, sub, query = ("", None, None, {}) if found else self._split()
        state.requests.append((self.command, path, query))
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if (scheme.lower(), token) != ("bearer", state.token):
            self._answer(401, {"message": "Unauthorized"})
            return None
        if state.faults:
            fault = state.faults.pop(0)
            if fault == 0:
                self.close_connection = True
                self.connection.close()
            else:
                self._answer(fault, {"message": "injected"}, {"Retry-After": "0"} if fault == 429 else None)
            return None
        if found:
            self._discover(path.strip("/"))
            return None
        if plural in state.forbidden:
            self._answer(403, {"message": f"{plural} is forbidden"})
            return None
        if plural in state.unknown:
            self._answer(404, {"message": "the server could not find the requested resource"})
            return None
        return plural, name, sub, query

    def _discover(self, path: str) -> None:
        """Which groups there are, or what is in one; an operator that is not installed has brought neither."""
        state = self.server_state
        known = {v: [pair for pair in pairs if pair[1] not in state.unknown] for v, pairs in KINDS.items()}
        known = {version: pairs for version, pairs in known.items() if pairs}
        if path == "version":
            return self._answer(200, {"gitVersion": "v1.34.0"})
        if path == "apis":
            groups = [version.split("/") for version in known if "/" in version]
            versions = [(group, {"groupVersion": f"{group}/{v}", "version": v}) for group, v in groups]
            listed = [{"name": group, "versions": [v], "preferredVersion": v} for group, v in versions]
            return self._answer(200, {"kind": "APIGroupList", "groups": listed})
        pairs = known.get(path.partition("/")[2])
        if pairs is None:
            return self._answer(404, {"message": "the server could not find the requested resource"})
        resources = [{"name": p, "kind": kind, "namespaced": kind not in CLUSTER_WIDE} for kind, p in pairs]
        self._answer(200, {"kind": "APIResourceList", "resources": resources})

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        found = self._begin()
        if found is None:
            return
        plural, name, _, query = found
        document = json.loads(body)
        if self.headers["Content-Type"] == "application/merge-patch+json":
            return self._merge(plural, str(name), document)
        namespace = document["metadata"].get("namespace")
        if self.server_state.namespaces is not None and namespace not in self.server_state.namespaces:
            return self._answer(404, {"message": f'namespaces "{namespace}" not found'})
        try:
            if self.headers["Content-Type"] != "application/apply-patch+yaml" or query.get("fieldManager") != "argosy":
                raise AssertionError("not a server-side apply")
            if plural in OPERATORS:
                check_strictly(document, OPERATORS[plural])
            elif document["apiVersion"] in ("v1", "batch/v1", "storage.k8s.io/v1"):
                kubernetes_validate.validate(document, "1.34.0", strict=query.get("fieldValidation") == "Strict")
        except Exception as error:  # noqa: BLE001 - the server's word on any fault
            return self._answer(422, {"message": str(error)[:500]})
        lacking = [field for field in self.server_state.missing_fields if f'"{field}"' in json.dumps(document)]
        if lacking:
            # As a server of 1.35 answers an apply of a field that the schema does not declare.
            said = f"failed to create typed patch object ({namespace}/{name}; {document['apiVersion']}, Kind={document['kind']}): "
            return self._answer(500, {"message": f"{said}.spec.{lacking[0]}: field not declared in schema"})
        if query.get("dryRun") == "All":
            return self._answer(200, document)
        old = self.server_state.objects.get((plural, str(name)), {})
        self.server_state.put(plural, old | document | {"metadata": old.get("metadata", {}) | document["metadata"]})
        self._answer(200, document)

    def _merge(self, plural: str, name: str, changes: Object) -> None:
        document = self.server_state.objects.get((plural, name))
        if document is None:
            return self._answer(404, {"message": "not found"})
        marks = document["metadata"].get("annotations", {}) | changes["metadata"]["annotations"]
        document["metadata"]["annotations"] = {key: value for key, value in marks.items() if value is not None}
        self.server_state.put(plural, document)
        self._answer(200, document)

    def do_POST(self) -> None:
        """A review of a right, the one thing that is created and not applied."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._begin() is None:
            return
        of = asked["spec"]["resourceAttributes"]
        resource = "/".join(part for part in (of["resource"], of["subresource"]) if part)
        self._answer(201, asked | {"status": {"allowed": (of["verb"], resource) not in self.server_state.denied}})

    def do_DELETE(self) -> None:
        found = self._begin()
        if found is None:
            return
        plural, name, _, _ = found
        with self.server_state.changed:
            objects = self.server_state.objects
            gone = objects.pop((plural, str(name)), None)
            # A job's pods go with it.
            mine = {} if gone is None else gone["metadata"].get("labels", {})
            own = {key: mine[key] for key in ("argosy/run", "argosy/stage") if key in mine}
            for key, pod in list(objects.items()):
                if len(own) == 2 and key[0] == "pods" and own.items() <= pod["metadata"]["labels"].items():
                    del objects[key]
            self.server_state.changed.notify_all()
        self._answer(200 if gone else 404, {"message": "" if gone else "not found"})

    def do_GET(self) -> None:
        found = self._begin()
        if found is None:
            return
        plural, name, sub, query = found
        if sub == "log":
            return self._log(str(name), query)
        if sub == "proxy":
            return self._proxy(str(name))
        if name is not None:
            document = self.server_state.objects.get((plural, name))
            if plural == "persistentvolumeclaims" and self.server_state.any_claim:
                document = document or {"metadata": {"name": name}, "status": {"phase": "Bound"}}
            return self._answer(200 if document else 404, document or {"message": "not found"})
        if query.get("watch") == "true":
            return self._watch(plural, query)
        items = [document for (kind, _), document in self.server_state.objects.items() if kind == plural]
        wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
        items = [item for item in items if wanted.items() <= item["metadata"].get("labels", {}).items()]
        self._answer(200, {"items": items, "metadata": {"resourceVersion": str(self.server_state.version)}})

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _watch(self, plural: str, query: dict[str, str]) -> None:
        state, seen = self.server_state, int(query.get("resourceVersion") or 0)
        self._stream()
        deadline = time.monotonic() + min(3.0, float(query.get("timeoutSeconds", "3")))
        while time.monotonic() < deadline:
            with state.changed:
                state.changed.wait(0.1)
                fresh = [
                    d for (kind, _), d in state.objects.items()
                    if kind == plural and int(d["metadata"]["resourceVersion"]) > seen
                ]  # fmt: skip
                seen = state.version
            for document in fresh:
                self._chunk(json.dumps({"type": "MODIFIED", "object": document}) + "\n")
        self._chunk("")

    def _proxy(self, name: str) -> None:
        """Pass a request on to the server of a pod, without the user's own credentials."""
        port = self.server_state.proxies.get(name)
        if port is None:
            return self._answer(503, {"message": "no endpoints available"})
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

    def _log(self, name: str, query: dict[str, str]) -> None:
        state = self.server_state
        lines = state.logs[name]
        since = query.get("sinceTime", "")
        lines = [line for line in lines if line.split(" ", 1)[0] >= since]
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

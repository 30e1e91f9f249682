"""The Kubernetes API as a launch uses it: apply, get, list, watch, logs, delete.

The official client finds the cluster and proves who we are; requests are made with its generic call, so that core kinds and
operators' kinds go one way. Everything sent may be sent again: applying is idempotent, watches resume, and a server that is
busy, restarting or out of reach is tried again with growing pauses.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from argosy.errors import ArgosyError
from argosy.launch.pod import Manifest

MANAGER = "argosy"
_PLURALS = {  # kind -> (path of its API group and version, plural); whether it has a namespace is told below
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "PersistentVolume": ("api/v1", "persistentvolumes"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    "Service": ("api/v1", "services"),
    "StorageClass": ("apis/storage.k8s.io/v1", "storageclasses"),
    "Job": ("apis/batch/v1", "jobs"),
    "JobSet": ("apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "PyTorchJob": ("apis/kubeflow.org/v1", "pytorchjobs"),
    "TrainJob": ("apis/trainer.kubeflow.org/v1alpha1", "trainjobs"),
    "TrainingRuntime": ("apis/trainer.kubeflow.org/v1alpha1", "trainingruntimes"),
    "HyperPodPyTorchJob": ("apis/sagemaker.amazonaws.com/v1", "hyperpodpytorchjobs"),
    "ComputeDomain": ("apis/resource.nvidia.com/v1beta1", "computedomains"),
    "PodGroup.scheduling.volcano.sh": ("apis/scheduling.volcano.sh/v1beta1", "podgroups"),
    "PodGroup.scheduling.x-k8s.io": ("apis/scheduling.x-k8s.io/v1alpha1", "podgroups"),
}
_OPERATORS = {
    "JobSet": "JobSet (jobset.sigs.k8s.io)",
    "PyTorchJob": "Kubeflow's Training Operator 1.x",
    "TrainJob": "Kubeflow Trainer 2.x",
    "HyperPodPyTorchJob": "SageMaker HyperPod's training operator",
}
_NO_NAMESPACE = ("PersistentVolume", "StorageClass")
_AGAIN = (409, 429, 500, 502, 503, 504)


class Absent(Exception):
    """404: the object, or its kind, is not there."""


class Forbidden(ArgosyError):
    """403: whoever asks has no right to it."""


@dataclass
class Patience:
    """How long a server that does not answer well is tried."""

    attempts: int = 8
    first_delay: float = 0.5
    longest_delay: float = 20.0
    sleep: Callable[[float], None] = field(default=time.sleep)

    def delays(self) -> Iterator[float]:
        for attempt in range(self.attempts - 1):
            yield min(self.longest_delay, self.first_delay * 2**attempt)


class Cluster:
    """One API server, one namespace."""

    def __init__(self, client: Any, namespace: str, patience: Patience | None = None) -> None:
        self._client, self.namespace, self._patience = client, namespace, patience or Patience()

    def apply(self, document: Manifest) -> None:
        """Make it so, whatever is there (server-side apply). Fields the server does not know are refused, not dropped."""
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        headers = {"Content-Type": "application/apply-patch+yaml"}
        self._ask("PATCH", self._path(kind_of(document), document["metadata"]["name"]), query, headers, document)

    def get(self, kind: str, name: str) -> Manifest | None:
        try:
            return self._json("GET", self._path(kind, name))
        except Absent:
            return None

    def require(self, kind: str) -> None:
        """Refuse where no operator has made this kind known: the object itself may be absent, its list not."""
        try:
            self._ask("GET", self._path(kind), {"limit": "1"})
        except Absent:
            raise ArgosyError(
                "launch.refused",
                f"this cluster does not know the kind {kind}: it needs {_OPERATORS.get(kind, 'its operator')}",
                key="cluster.target",
                fix="install that, or choose another target: --target indexed-job needs none",
            ) from None

    def find(self, kind: str, selector: Mapping[str, str] | None = None, fields: str | None = None) -> list[Manifest]:
        """Empty where the cluster does not know the kind."""
        return self._list(kind, selector, fields)[0]

    def _list(
        self, kind: str, selector: Mapping[str, str] | None = None, fields: str | None = None
    ) -> tuple[list[Manifest], str]:
        query = {} if selector is None else {"labelSelector": ",".join(f"{k}={v}" for k, v in selector.items())}
        if fields is not None:
            query["fieldSelector"] = fields
        try:
            found = self._json("GET", self._path(kind), query)
        except Absent:
            return [], ""
        items = [item | {"kind": kind} for item in found.get("items", [])]
        return items, str(found.get("metadata", {}).get("resourceVersion", ""))

    def delete(self, kind: str, name: str) -> bool:
        """With all it owns; pods get their time to save. False: it was not there."""
        try:
            self._ask("DELETE", self._path(kind, name), {"propagationPolicy": "Foreground"})
        except Absent:
            return False
        return True

    def changes(self, kind: str, selector: Mapping[str, str], seconds: int) -> Iterator[None]:
        """Something has changed. Ends after `seconds`, or when the connection is lost: look again and call it anew."""
        _, version = self._list(kind, selector)
        query = {
            "watch": "true",
            "labelSelector": ",".join(f"{k}={v}" for k, v in selector.items()),
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        yield from (None for _ in self._lines("GET", self._path(kind), query, wait=seconds + 5.0))

    def logs(
        self, pod: str, *, follow: bool = False, tail: int | None = None, since: str | None = None
    ) -> Iterator[str]:
        """Lines of a pod's only container, each with its time where `since` or `follow` is used to go on."""
        query = {"timestamps": "true"} | ({"follow": "true"} if follow else {})
        query |= {} if tail is None else {"tailLines": str(tail)}
        query |= {} if since is None else {"sinceTime": since}
        yield from self._lines("GET", f"{self._path('Pod', pod)}/log", query, wait=600.0 if follow else 60.0)

    def _path(self, kind: str, name: str | None = None) -> str:
        base, plural = _PLURALS[kind]
        place = "" if kind in _NO_NAMESPACE else f"/namespaces/{self.namespace}"
        return f"/{base}{place}/{plural}" + ("" if name is None else f"/{name}")

    def _json(self, method: str, path: str, query: Mapping[str, str] | None = None) -> Manifest:
        return dict(json.loads(self._ask(method, path, query)))

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Manifest | None = None,
    ) -> bytes:
        """One answer, however often it takes to get it."""
        delays = self._patience.delays()
        while True:
            fault = ""
            try:
                answer = self._send(method, path, query, headers, body, wait=30.0)
                content = bytes(answer.data)
            except OSError as error:
                fault = str(error)
                asked = None
            else:
                if answer.status < 300:
                    return content
                if answer.status not in _AGAIN:
                    raise _refusal(method, path, answer.status, content)
                fault = f"{answer.status}: {_message(content)}"
                asked = answer.headers.get("Retry-After")
            delay = next(delays, None)
            if delay is None:
                raise ArgosyError(
                    "launch.api",
                    f"the Kubernetes API server did not answer {method} {path} after {self._patience.attempts} attempts: {fault}",
                    fix="`kubectl get --raw /readyz` says how it is; run the same command again, nothing is done twice",
                )
            self._patience.sleep(float(asked) if asked and asked.isdigit() else delay)

    def _lines(self, method: str, path: str, query: Mapping[str, str], wait: float) -> Iterator[str]:
        """Of an answer that comes bit by bit. A lost connection ends it, and is no error."""
        from urllib3.exceptions import HTTPError

        try:
            answer = self._send(method, path, query, None, None, wait=wait)
            if answer.status >= 300:
                if answer.status in (400, 404, 410, *_AGAIN):  # not started yet, gone, or too old to go on from
                    return
                raise _refusal(method, path, answer.status, bytes(answer.data))
            rest = b""
            for chunk in answer.stream(8192):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except (OSError, HTTPError):
            return

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        body: Manifest | None,
        wait: float,
    ) -> Any:
        """Faults of the connection come out as OSError."""
        from urllib3.exceptions import HTTPError

        given = {"Accept": "application/json"} | dict(headers or {})
        token: dict[str, Any] = {}
        self._client.update_params_for_auth(given, token, ["BearerToken"])
        url = self._client.configuration.host + path
        try:
            return self._client.rest_client.pool_manager.request(
                method,
                url + ("" if not query else "?" + "&".join(f"{k}={_quoted(v)}" for k, v in query.items())),
                body=None if body is None else json.dumps(body).encode(),
                headers=given,
                preload_content=method != "GET" or not query or not ({"watch", "follow", "timestamps"} & query.keys()),
                timeout=wait,
                retries=False,
            )
        except HTTPError as error:
            raise OSError(str(error)) from None


def connect(namespace: str | None, *, in_cluster: bool = False, patience: Patience | None = None) -> Cluster:
    """The cluster kubectl would talk to, or the one this pod runs in."""
    try:
        from kubernetes import client, config
        from kubernetes.config import ConfigException
        from yaml import YAMLError
    except ImportError:
        raise ArgosyError(
            "launch.missing-extra",
            "talking to Kubernetes needs its official client, which is not installed",
            fix="pip install 'argosy[k8s]'; or argosy launch --dry-run -o DIR, and kubectl apply -f on each file in the order of their numbers",
        ) from None
    settings = client.Configuration()
    settings.retries = False
    current: dict[str, Any] = {}
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=settings)
        else:
            files = os.environ.get("KUBECONFIG")  # the client reads it once, when it is imported
            current = config.list_kube_config_contexts(files)[1]
            config.load_kube_config(files, client_configuration=settings)
    except (ConfigException, TypeError, YAMLError) as error:
        raise ArgosyError(
            "launch.api",
            f"no cluster is configured: {error}",
            fix="--in-cluster is for a pod with a service account, as the chart's conductor: leave it out elsewhere"
            if in_cluster
            else "set KUBECONFIG or ~/.kube/config as for kubectl; AKS: az aks get-credentials, EKS: aws eks update-kubeconfig",
        ) from None
    default = (current.get("context") or {}).get("namespace") or "default"
    return Cluster(client.ApiClient(settings), namespace or default, patience)


def kind_of(document: Manifest) -> str:
    """As it is found by; two schedulers have a kind of the same name."""
    group = str(document["apiVersion"]).partition("/")[0]
    return f"PodGroup.{group}" if document["kind"] == "PodGroup" else str(document["kind"])


def _quoted(value: str) -> str:
    from urllib.parse import quote

    return quote(value, safe="")


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content).get("message") or content.decode(errors="replace"))[:600]
    except (ValueError, AttributeError):
        return content.decode(errors="replace")[:300]


def _refusal(method: str, path: str, status: int, content: bytes) -> Exception:
    if status == 404 and method in ("GET", "DELETE"):
        return Absent(path)
    said = _message(content)
    fixes = {
        401: "log in again: the credentials of this context have expired",
        403: "ask for the right to do this in the namespace, or choose another with cluster.namespace",
        404: "install the operator this target needs, or choose another: --target indexed-job needs none",
        422: "see what the server says; the operator may be older than what is rendered for",
    }
    cause, fix = f"{method} {path}: {status}: {said}", fixes.get(status, "see what the server says")
    if status == 404 and said.startswith("namespaces "):
        fix = "kubectl create namespace …, or another with cluster.namespace: it has to be there before a run is"
    if status == 403:
        return Forbidden("launch.refused", cause, fix=fix)
    return ArgosyError("launch.refused", cause, fix=fix)

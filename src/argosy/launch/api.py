"""The Kubernetes API as a launch uses it: apply, get, list, watch, logs, delete, through the official client's DynamicClient.

Discovery tells which kinds the server knows and under which paths, so core kinds and operators' kinds use the same code. Every
request may be repeated: applying is idempotent, watches resume, and one retry policy repeats requests to a server that is busy,
restarting or out of reach. This module needs the extra `k8s`; `targets/kubernetes.py` imports it only when it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kubernetes import client, config
from kubernetes.client.rest import ApiException
from kubernetes.config import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.discovery import LazyDiscoverer
from kubernetes.dynamic.exceptions import NotFoundError, ResourceNotFoundError
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from argosy.errors import ArgosyError
from argosy.launch.manifests import POD, Kind, kind_of
from argosy.launch.pod import Manifest
from argosy.retry import GaveUp, RetryPolicy, Transient, retry_after_s

MANAGER = "argosy"
# 409: the object changed meanwhile, or its namespace is being created.
RETRY = RetryPolicy(attempts=8, base_s=0.5, cap_s=20.0, statuses=frozenset({409, 429, 500, 502, 503, 504}))
# 400: the container has not started. 404: the object is gone. 410: the resource version is too old to resume a watch from.
_NOTHING_TO_READ = frozenset({400, 404, 410})
_WAIT_S = 30.0
_ACCESS_REVIEW = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview")
# What a server says of a field that its schema does not have, or has with another type: with status 500, although asking again cannot help.
UNKNOWN_FIELD = "field not declared in schema"
# What a server says of a request that an admission webhook or policy refused: with status 403, although the user has the right.
DENIED = "denied the request"
_VERDICTS = (UNKNOWN_FIELD, "failed to create typed patch object")
# A path below a file, where no file can exist.
_NO_FILE = f"{os.devnull}/discovery"


class Forbidden(ArgosyError):
    """The refusal for HTTP 403: the user or service account lacks the permission."""


class Cluster:
    """One namespace of one API server."""

    def __init__(self, api: client.ApiClient, namespace: str, retry: RetryPolicy = RETRY) -> None:
        self._api, self.namespace, self._retry = api, namespace, retry
        self._dynamic: _RetryingClient | None = None
        # Resources looked up so far. None: the server does not know the kind.
        self._resources: dict[Kind, Any] = {}

    def apply(self, document: Manifest, *, dry_run: bool = False) -> None:
        """Create or update an object by server-side apply. The server rejects unknown fields instead of dropping them.

        With `dry_run` the server checks rights, fields and admission rules as it would, and stores nothing.
        """
        kind = kind_of(document)
        self._require(kind).server_side_apply(
            body=document,
            namespace=self.namespace,
            field_manager=MANAGER,
            force_conflicts="true",
            query_params=[("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])],
            serializer=_plain,
        )

    def get(self, kind: Kind, name: str) -> Manifest | None:
        resource = self._resource(kind)
        try:
            return None if resource is None else resource.get(name, self.namespace, serializer=_plain)
        except NotFoundError:
            return None

    def require(self, kind: Kind) -> None:
        """Refuse a kind that the server does not know.

        Raises:
            ArgosyError: the kind is unknown. The refusal names the operator that provides it.
        """
        self._require(kind)

    def annotate(self, kind: Kind, name: str, marks: Mapping[str, str | None]) -> None:
        """Set annotations of an object and leave everything else as it is. None removes an annotation."""
        self._require(kind).patch(
            body={"metadata": {"annotations": dict(marks)}},
            name=name,
            namespace=self.namespace,
            content_type="application/merge-patch+json",
            serializer=_plain,
        )

    def knows(self, kind: Kind) -> bool:
        return self._resource(kind) is not None

    def may(self, group: str, resource: str, verb: str) -> bool:
        """Return whether this user may use a verb on a resource of the namespace. If the server does not say, return True."""
        reviews = self._resource(_ACCESS_REVIEW)
        if reviews is None:
            return True
        name, _, part = resource.partition("/")
        asked = {"namespace": self.namespace, "group": group, "resource": name, "subresource": part, "verb": verb}
        named = {"apiVersion": _ACCESS_REVIEW.api_version, "kind": _ACCESS_REVIEW.name}
        answer = reviews.create(body=named | {"spec": {"resourceAttributes": asked}}, serializer=_plain)
        return bool(answer.get("status", {}).get("allowed"))

    def find(self, kind: Kind, selector: Mapping[str, str] | None = None, fields: str | None = None) -> list[Manifest]:
        """Return the objects of a kind that match a label selector and a field selector; an unknown kind has none."""
        return self._list(kind, selector, fields)[0]

    def _list(self, kind: Kind, selector: Mapping[str, str] | None, fields: str | None) -> tuple[list[Manifest], str]:
        """Return the objects and the resource version of the list, from which a watch can start."""
        resource = self._resource(kind)
        if resource is None:
            return [], ""
        try:
            found = resource.get(
                namespace=self.namespace,
                label_selector=None if selector is None else _joined(selector),
                field_selector=fields,
                serializer=_plain,
            )
        except NotFoundError:
            return [], ""
        named = {"apiVersion": kind.api_version, "kind": kind.name}
        version = str(found.get("metadata", {}).get("resourceVersion", ""))
        return [item | named for item in found.get("items") or []], version

    def delete(self, kind: Kind, name: str, *, owned_first: bool = True) -> bool:
        """Delete an object and all it owns. Pods get their grace period to save. Return False if the object did not exist.

        Args:
            owned_first: keep the object until all it owns is gone.
        """
        resource = self._resource(kind)
        if resource is None:
            return False
        try:
            policy = "Foreground" if owned_first else "Background"
            resource.delete(name, self.namespace, propagation_policy=policy, serializer=_plain)
        except NotFoundError:
            return False
        return True

    def changes(self, kind: Kind, selector: Mapping[str, str], seconds: int) -> Iterator[None]:
        """Yield once for each change. Stop after `seconds`, or when the connection is lost; the caller then looks and calls again."""
        _, version = self._list(kind, selector, None)
        resource = self._resource(kind)
        if resource is not None:
            watched = {
                "watch": "true",
                "label_selector": _joined(selector),
                "resource_version": version,
                "timeout_seconds": seconds,
            }
            yield from (None for _ in self._lines(resource, None, seconds + 5.0, **watched))

    def logs(
        self, pod: str, *, follow: bool = False, tail: int | None = None, since: str | None = None
    ) -> Iterator[str]:
        """Yield the lines of a pod's only container, each prefixed with its timestamp. `since` takes such a timestamp to resume from."""
        query = [("timestamps", "true")] + ([("follow", "true")] if follow else [])
        query += [] if tail is None else [("tailLines", str(tail))]
        query += [] if since is None else [("sinceTime", since)]
        log = self._require(POD).subresources["log"]
        yield from self._lines(log, pod, 600.0 if follow else 60.0, query_params=query)

    def through_pod(
        self, pod: str, port: int, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]
    ) -> bytes:
        """Return the answer of a pod's HTTP server to a GET request, which the API server passes on."""
        where = f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{port}/proxy/{path}"

        def ask() -> bytes:
            try:
                answer = self._api.call_api(
                    where, "GET", query_params=list(query), header_params=dict(headers), auth_settings=["BearerToken"],
                    _preload_content=False, _return_http_data_only=True, _request_timeout=(_WAIT_S, 2 * _WAIT_S),
                )  # fmt: skip
                return bytes(answer.data)
            except ApiException as error:
                if not error.status or error.status in self._retry.statuses:
                    raise Transient(f"{error.status}: {_message(error)}") from None
                raise _refusal("GET", where, error) from None
            except (OSError, HTTPError) as error:
                raise Transient(str(error)) from None

        try:
            return self._retry.call(ask)
        except GaveUp as over:
            cause = f"the pod {pod} did not answer through the API server after {over.attempts} attempts: {over}"
            raise ArgosyError(
                "launch.api", cause, fix="check that a NetworkPolicy lets the API server reach pods of the namespace"
            ) from None

    def _lines(self, resource: Any, name: str | None, wait_s: float, **params: Any) -> Iterator[str]:
        """Yield the lines of a streamed response. A lost connection ends the stream without an error."""
        timeout = (wait_s, wait_s)
        try:
            answer = resource.get(name, self.namespace, serialize=False, _request_timeout=timeout, **params)
            rest = b""
            for chunk in answer.stream(8192):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except ApiException as error:
            if error.status in _NOTHING_TO_READ or error.status in self._retry.statuses or not error.status:
                return
            raise _refusal("GET", resource.path(name, self.namespace), error) from None
        except (OSError, HTTPError):
            return

    def _require(self, kind: Kind) -> Any:
        resource = self._resource(kind)
        if resource is None:
            needs = "its operator" if kind.operator is None else f"{kind.operator.name} {kind.operator.least} or newer"
            raise ArgosyError(
                "launch.refused",
                f"this cluster does not know the kind {kind.name}: it needs {needs}",
                key="cluster.target",
                fix=f"{install_hint(kind)}, or choose another target: --target indexed-job needs no operator",
            )
        return resource

    def _resource(self, kind: Kind) -> Any:
        """Return the API resource of a kind, or None if the server does not know it. Each kind is looked up once."""
        if self._dynamic is None:
            self._dynamic = _RetryingClient(self._api, self._retry)
        if kind not in self._resources:
            group, _, version = kind.api_version.rpartition("/")
            # Without the prefix, discovery would search for a core kind in every group that has a v1.
            place = {"prefix": "apis", "group": group} if group else {"prefix": "api"}
            try:
                found = self._dynamic.resources.get(**place, api_version=version, kind=kind.name)
            except ResourceNotFoundError:
                found = None
            self._resources[kind] = found
        return self._resources[kind]


def install_hint(kind: Kind) -> str:
    """Return how to get the operator of a kind."""
    return "install that" if kind.operator is None else f"install it: {kind.operator.install}"


class _Discovery(LazyDiscoverer):  # type: ignore[misc]  # the client has no types
    """API discovery cached in memory, for the lifetime of this process.

    The library caches its discovery in a file with a predictable name in the temporary directory, where another user of the machine
    may have planted one. It also repeats the whole discovery for each kind it does not find.
    """

    def __init__(self, dynamic: DynamicClient, cache_file: str | None) -> None:
        super().__init__(dynamic, _NO_FILE)

    def _write_cache(self) -> None: ...

    def invalidate_cache(self) -> None: ...


class _RetryingClient(DynamicClient):  # type: ignore[misc]  # the client has no types
    """A DynamicClient with retries, timeouts and plain error messages, for discovery requests too.

    A 404 on GET or DELETE stays the library's `NotFoundError`. Streamed responses (`serialize=False`) are neither retried nor
    translated: their reader does both.
    """

    def __init__(self, api: client.ApiClient, retry: RetryPolicy) -> None:
        self._retry = retry
        super().__init__(api, discoverer=_Discovery)

    def request(self, method: str, path: str, body: Manifest | None = None, **params: Any) -> Any:
        if not params.get("serialize", True):
            return super().request(method, path, body, **params)
        params.setdefault("_request_timeout", (_WAIT_S, _WAIT_S))
        asked = f"{method.upper()} /{path.lstrip('/')}"
        try:
            # Each attempt extends the query in place, so it gets a copy.
            answer = self._retry.call(lambda: self._attempt(method, path, body, _copied(params)))
        except GaveUp as over:
            raise ArgosyError(
                "launch.api",
                f"the Kubernetes API server did not answer {asked} after {over.attempts} attempts: {over}",
                fix="`kubectl get --raw /readyz` says how it is; run the same command again, nothing is done twice",
            ) from None
        if isinstance(answer, str):
            raise ArgosyError(
                "launch.api",
                f"{asked}: the answer of {self.configuration.host} is not JSON: {answer[:80]!r}",
                fix="check the server's address in the kubeconfig, and HTTPS_PROXY: something else answers in its place",
            )
        return answer

    def _attempt(self, method: str, path: str, body: Manifest | None, params: dict[str, Any]) -> Any:
        try:
            return super().request(method, path, body, **params)
        except ApiException as error:
            # Status 0: TLS failed before the server answered.
            if not error.status:
                raise Transient(str(error.reason)) from None
            final = any(verdict in _message(error) for verdict in _VERDICTS)
            if error.status in self._retry.statuses and not final:
                asked = retry_after_s(error.headers or {})
                raise Transient(f"{error.status}: {_message(error)}", retry_after_s=asked) from None
            if error.status == 404 and method.upper() in ("GET", "DELETE"):
                raise
            raise _refusal(method.upper(), f"/{path.lstrip('/')}", error) from None
        except (OSError, HTTPError) as error:
            raise Transient(str(error)) from None


def connect(namespace: str | None, *, in_cluster: bool = False, retry: RetryPolicy = RETRY) -> Cluster:
    """Return the cluster kubectl would talk to, or the one this pod runs in. This sends no request.

    Raises:
        ArgosyError: no cluster is configured.
    """
    settings = client.Configuration()
    settings.retries = False
    current: dict[str, Any] = {}
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=settings)
        else:
            # The client reads KUBECONFIG only once, at import.
            files = os.environ.get("KUBECONFIG")
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
    return Cluster(client.ApiClient(settings), namespace or default, retry)


def _plain(_: Any, answer: Manifest) -> Manifest:
    """Return the response as a plain dictionary. The library would wrap each of its fields."""
    return answer


def _joined(selector: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in selector.items())


def _copied(params: dict[str, Any]) -> dict[str, Any]:
    return params | {"query_params": list(params.get("query_params", []))}


def _message(error: ApiException) -> str:
    text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        return str(json.loads(text).get("message") or text)[:600]
    except (ValueError, AttributeError):
        return text[:300]


def _refusal(method: str, path: str, error: ApiException) -> ArgosyError:
    said = _message(error)
    fixes = {
        401: "log in again: the credentials of this context have expired",
        403: "ask for the right to do this in the namespace, or choose another with cluster.namespace",
        404: "install the operator this target needs, or choose another: --target indexed-job needs none",
        422: "see what the server says; the operator may be older than what is rendered for",
    }
    cause, fix = f"{method} {path}: {error.status}: {said}", fixes.get(error.status, "see what the server says")
    if error.status == 404 and said.startswith("namespaces "):
        fix = "kubectl create namespace …, or another with cluster.namespace: it has to be there before a run is"
    if DENIED in said:
        fix = "see what the admission webhook or policy of the cluster says, and change that in the run spec"
    elif error.status == 403:
        return Forbidden("launch.refused", cause, fix=fix)
    return ArgosyError("launch.refused", cause, fix=fix)

"""One conversation with an API server: every request that a launch makes, and the ways in which a server refuses them.

The same requests go to a real server and to the emulation, and the answers can be compared. To record the answers of a real cluster:

    ARGOSY_E2E_KUBECONFIG=… python tests/launch/api_conversation.py tests/launch/recorded

The user of the kubeconfig may create namespaces and act as others (`impersonate`). Everything happens in the namespace `argosy-recorded`, which is
made and deleted. The part about JobSets is left out where the cluster has none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from kubernetes import config

Object = dict[str, Any]
SPACE = "argosy-recorded"
NOBODY = f"system:serviceaccount:{SPACE}:nobody"
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
MAPS, PODS, JOBS = (f"{group}/namespaces/{SPACE}/{plural}" for group, plural in (
    ("/api/v1", "configmaps"), ("/api/v1", "pods"), ("/apis/batch/v1", "jobs"),
))  # fmt: skip
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{SPACE}/jobsets"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
MINE = {"argosy/run": "recorded", "argosy/stage": "train"}
# Values that differ from one conversation to the next.
_VOLATILE = ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_RESOURCES = ("configmaps", "events", "jobs", "jobsets", "pods", "pods/log")


class Answer(NamedTuple):
    """A server's answer: a JSON document, the documents of a stream, or text."""

    status: int
    body: Any

    @property
    def version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])


Ask = Callable[..., Answer]


def asking(kubeconfig: str | Path) -> Ask:
    """Return a function that sends one request to the server of a kubeconfig."""
    api = config.new_client_from_config(config_file=str(kubeconfig))
    token = api.configuration.get_api_key_with_prefix("authorization")

    def ask(
        method: str, path: str, body: Any = None, *, sent_as: str = "application/json", user: str = "", **query: Any
    ) -> Answer:
        headers = {"Accept": "application/json", "Content-Type": sent_as} | ({"Authorization": token} if token else {})
        headers |= {"Impersonate-User": user} if user else {}
        answer = api.rest_client.pool_manager.request(
            method, f"{api.configuration.host}{path}?{urlencode(query)}", headers=headers, retries=False, timeout=30.0,
            body=None if body is None else json.dumps(body).encode(),
        )  # fmt: skip
        text = answer.data.decode()
        if query.get("watch"):
            return Answer(answer.status, [json.loads(line) for line in text.splitlines()])
        try:
            return Answer(answer.status, json.loads(text))
        except ValueError:
            return Answer(answer.status, text)

    return ask


def settled(node: Any) -> Any:
    """Return an answer without what differs between two conversations, and objects without their content."""
    if isinstance(node, list):
        return [settled(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "resources" in node:
        chosen = [resource for resource in node["resources"] if resource["name"] in _RESOURCES]
        return [{key: resource[key] for key in ("name", "kind", "namespaced", "verbs")} for resource in chosen]
    if "groups" in node:
        return [sorted(group) for group in node["groups"] if group["name"] == "batch"]
    if "gitVersion" in node:
        return "gitVersion"
    if "metadata" in node and "items" not in node and node.get("kind") != "Status":
        phase = (node.get("status") or {}).get("phase")
        node = {key: node[key] for key in ("kind", "apiVersion", "metadata") if key in node} | (
            {"phase": phase} if phase else {}
        )
    kept = {key: value for key, value in node.items() if key not in ("managedFields", "generation")}
    return {key: "…" if key in _VOLATILE else settled(value) for key, value in kept.items()}


def config_map(name: str, **data: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": SPACE, "labels": MINE},
        "data": data,
    }


def pod(name: str) -> Object:
    """Return a pod that no node takes."""
    spec = {
        "containers": [{"name": "argosy", "image": "registry.invalid/none"}],
        "nodeSelector": {"argosy/none": "none"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": SPACE, "labels": MINE},
        "spec": spec,
    }


def job(name: str, **more: Any) -> Object:
    template = {"metadata": {"labels": MINE}, "spec": pod(name)["spec"] | {"restartPolicy": "Never"}}
    spec = {"template": template} | more
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": SPACE, "labels": MINE},
        "spec": spec,
    }


def job_set(name: str, **more: Any) -> Object:
    inner = {"replicas": 1, "name": "pods", "template": {"spec": {"template": job(name)["spec"]["template"]}}}
    metadata = {"name": name, "namespace": SPACE, "labels": MINE}
    spec = {"replicatedJobs": [inner], "suspend": True} | more
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


class Conversation:
    """The answers of one server, by what was asked."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.answers = ask, dict[str, Answer]()

    def note(self, what: str, *words: Any, **named: Any) -> Answer:
        answer = self.answers[what] = self.ask(*words, **named)
        return answer

    def apply(self, what: str, where: str, document: Object, **query: Any) -> Answer:
        """Apply a document as a launch does, and keep the answer."""
        query = {"fieldManager": "argosy", "force": "true", "fieldValidation": "Strict"} | query
        return self.note(what, "PATCH", f"{where}/{document['metadata']['name']}", document, sent_as=APPLY, **query)

    def hold(self) -> dict[str, Answer]:
        self.discover()
        self.change_objects()
        self.refuse_objects()
        self.read()
        self.review_rights()
        self.watch()
        self.read_logs()
        self.delete()
        if self.ask("GET", JOBSETS).status == 200:
            self.custom_objects()
        return self.answers

    def discover(self) -> None:
        self.note("version", "GET", "/version")
        self.note("core kinds", "GET", "/api/v1")
        self.note("kinds of a group", "GET", "/apis/batch/v1")
        self.note("groups", "GET", "/apis")
        self.note("a group that is not there", "GET", "/apis/argosy.invalid/v1")

    def change_objects(self) -> None:
        made = self.apply("apply a new object", MAPS, config_map("spec", a="1"))
        same = self.apply("apply the same again", MAPS, config_map("spec", a="1"))
        changed = self.apply("apply a change", MAPS, config_map("spec", a="2"))
        versions = [int(answer.version) for answer in (made, same, changed)]
        self.answers["versions of these: kept, then raised"] = Answer(
            0, [versions[0] == versions[1], versions[1] < versions[2]]
        )
        self.apply("apply a new object as a dry run", MAPS, config_map("dry", a="1"), dryRun="All")
        self.note("an object after its dry run", "GET", f"{MAPS}/dry")
        marks = {"metadata": {"annotations": {"argosy/end": "finished"}}}
        self.note("annotate", "PATCH", f"{MAPS}/spec", marks, sent_as=MERGE)
        self.apply("apply keeps an annotation of another", MAPS, config_map("spec", a="2"))
        marks = {"metadata": {"annotations": {"argosy/end": None}}}
        self.note("remove an annotation", "PATCH", f"{MAPS}/spec", marks, sent_as=MERGE)
        self.note("annotate what is not there", "PATCH", f"{MAPS}/none", marks, sent_as=MERGE)

    def refuse_objects(self) -> None:
        self.apply("a field that the kind does not have", MAPS, config_map("odd") | {"fata": {}})
        self.apply("a name that cannot be", MAPS, config_map("Bad_Name"))
        self.apply("a value that cannot be", JOBS, job("odd", backoffLimit=-1))
        self.apply("a pod without containers", PODS, pod("odd") | {"spec": {"containers": []}})
        where = MAPS.replace(SPACE, "argosy-none")
        elsewhere = config_map("spec") | {"metadata": {"name": "spec", "namespace": "argosy-none"}}
        self.apply("a namespace that is not there", where, elsewhere)
        self.apply("a field of another manager", MAPS, config_map("spec", a="3"), fieldManager="other", force="false")
        self.apply("a new job", JOBS, job("train"))
        self.apply("a change that a job cannot have", JOBS, job("train", completions=2))

    def read(self) -> None:
        self.note("get an object", "GET", f"{MAPS}/spec")
        self.note("get what is not there", "GET", f"{MAPS}/none")
        self.note("list by label", "GET", MAPS, labelSelector="argosy/run=recorded,argosy/stage=train")
        self.note("list by a label nothing has", "GET", MAPS, labelSelector="argosy/run=none")
        self.note("list by label a namespace that is not there", "GET", MAPS.replace(SPACE, "argosy-none"))
        self.note(
            "list warnings", "GET", MAPS.replace("configmaps", "events"), fieldSelector="type=Warning,reason=None"
        )
        self.note("list by a field that is none", "GET", PODS, fieldSelector="spec.none=1")
        self.note("a kind that is not there", "GET", MAPS.replace("configmaps", "nothings"))

    def review_rights(self) -> None:
        of = {"namespace": SPACE, "group": "", "resource": "pods", "subresource": "log", "verb": "get"}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": of},
        }
        for who, user in (("administrator", ""), ("nobody", NOBODY)):
            answer = self.ask("POST", REVIEWS, review, user=user)
            self.answers[f"may {who} read logs"] = Answer(answer.status, {"allowed": answer.body["status"]["allowed"]})
        self.note("list without the right", "GET", PODS, user=NOBODY)
        self.note("get without the right", "GET", f"{MAPS}/spec", user=NOBODY)
        self.note("logs without the right", "GET", f"{PODS}/p0/log", user=NOBODY)
        self.note("delete without the right", "DELETE", f"{JOBS}/train", user=NOBODY)
        query = {"fieldManager": "argosy", "force": "true", "fieldValidation": "Strict"}
        self.note(
            "apply without the right", "PATCH", f"{JOBS}/train", job("train"), sent_as=APPLY, user=NOBODY, **query
        )

    def watch(self) -> None:
        """A watch from before three changes tells them, those of the label only; then it ends by itself."""
        start = self.ask("GET", MAPS, labelSelector="argosy/run=watched").version
        watched = config_map("watched") | {
            "metadata": {"name": "watched", "namespace": SPACE, "labels": {"argosy/run": "watched"}}
        }
        self.apply("apply what is watched", MAPS, watched)
        self.apply("apply what is not watched", MAPS, config_map("unwatched"))
        self.apply("change what is watched", MAPS, watched | {"data": {"a": "1"}})
        self.note("delete what is watched", "DELETE", f"{MAPS}/watched", propagationPolicy="Background")
        wait_until(lambda: self.ask("GET", f"{MAPS}/watched").status == 404)
        selected = {"watch": "true", "labelSelector": "argosy/run=watched", "timeoutSeconds": 1}
        self.note("watch", "GET", MAPS, resourceVersion=start, **selected)

    def read_logs(self) -> None:
        self.apply("a new pod", PODS, pod("p0"))
        self.note("get a pod that waits", "GET", f"{PODS}/p0")
        self.note("logs of a pod that waits", "GET", f"{PODS}/p0/log", timestamps="true")
        self.note("logs of a pod that is not there", "GET", f"{PODS}/none/log", timestamps="true")
        self.note("a request to a pod that waits", "GET", f"{PODS}/p0:8266/proxy/runs")
        self.note("a request to a pod that is not there", "GET", f"{PODS}/none:8266/proxy/runs")

    def delete(self) -> None:
        self.note("delete an object", "DELETE", f"{MAPS}/unwatched", propagationPolicy="Foreground")
        self.note("delete a pod that waits", "DELETE", f"{PODS}/p0", propagationPolicy="Foreground")
        self.note("delete a job", "DELETE", f"{JOBS}/train", propagationPolicy="Foreground")
        self.note("delete what is not there", "DELETE", f"{JOBS}/none", propagationPolicy="Foreground")

    def custom_objects(self) -> None:
        self.note("kinds of an operator", "GET", "/apis/jobset.x-k8s.io/v1alpha2")
        self.apply("apply a new JobSet", JOBSETS, job_set("train"))
        self.apply("apply the same JobSet again", JOBSETS, job_set("train"))
        self.apply("a field that a JobSet does not have", JOBSETS, job_set("odd", nothing=1))
        self.apply(
            "a field that a JobSet does not have, as a dry run", JOBSETS, job_set("odd", nothing=1), dryRun="All"
        )
        self.apply("a value that a JobSet cannot have", JOBSETS, job_set("odd", successPolicy={"operator": "Most"}))
        self.apply("a type that a JobSet cannot have", JOBSETS, job_set("odd", suspend="yes"))
        self.note("get a JobSet", "GET", f"{JOBSETS}/train")
        self.note("get a JobSet that is not there", "GET", f"{JOBSETS}/none")
        self.note("list JobSets", "GET", JOBSETS, labelSelector="argosy/run=recorded")
        self.note("list JobSets without the right", "GET", JOBSETS, user=NOBODY)
        self.note("delete a JobSet", "DELETE", f"{JOBSETS}/train", propagationPolicy="Foreground")


def wait_until(ready: Callable[[], bool]) -> None:
    for _ in range(300):
        if ready():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")


def record(kubeconfig: str, directory: Path) -> Path:
    """Hold the conversation with a real cluster, and write its answers to a file that is named after the server's version."""
    ask = asking(kubeconfig)
    version = ask("GET", "/version").body["gitVersion"]
    ask("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    # Pods are refused until the namespace has its service account.
    wait_until(lambda: ask("GET", f"/api/v1/namespaces/{SPACE}/serviceaccounts/default").status == 200)
    try:
        answers = Conversation(ask).hold()
    finally:
        ask("DELETE", f"/api/v1/namespaces/{SPACE}")
    path = directory / f"kubernetes-{version}.json"
    told = {what: [answer.status, settled(answer.body)] for what, answer in answers.items()}
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{record(os.environ['ARGOSY_E2E_KUBECONFIG'], Path(sys.argv[1]))}\n")

"""What is rendered is what the API servers and operators accept: every object is held to their own schemas, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from crds import CORE, HYPERPOD_JOB, JOB_SET, POD_GROUPS, check_object, check_strictly
from rendering import CASES, GPU_EXAMPLE, NAMES, files_of, jobs_of, objects_of, pods_of

from argosy.launch.place import place
from argosy.launch.render import render

VERSIONS = ("1.31.0", "1.35.0", "1.37.0")
Case = tuple[str, Path, str | None, tuple[str, ...]]


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> None:
    reader = kubernetes_validate.utils.schema_contents
    if not hasattr(reader, "cache_info"):
        kubernetes_validate.utils.schema_contents = cache(reader)


def _distinct(found: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return {json.dumps(document, sort_keys=True): document for document in found}.values()


@pytest.mark.parametrize("version", VERSIONS)
def test_core_objects_are_valid_in_three_versions_of_kubernetes(version: str) -> None:
    """What operators' objects hold too: their pods are held to the schema of a Pod, their jobs to that of a Job."""
    seen = set()
    for document in _distinct(document for case in CASES for document in objects_of(files_of(case))):
        if document["apiVersion"] in CORE:
            kubernetes_validate.validate(document, version, strict=True)
            seen.add(document["kind"])
            continue
        for api, kind, specs in (("v1", "Pod", pods_of(document)), ("batch/v1", "Job", jobs_of(document))):
            for spec in _distinct(specs):
                inner = {"apiVersion": api, "kind": kind, "metadata": {"name": "a"}, "spec": spec}
                kubernetes_validate.validate(inner, version, strict=True)
                seen.add(kind)
    assert seen >= {"ConfigMap", "Job", "Service", "PersistentVolumeClaim", "StorageClass", "Pod"}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_objects_of_operators_have_no_field_they_do_not_know(case: Case) -> None:
    for document in objects_of(files_of(case)):
        if document["apiVersion"] not in CORE:  # those are checked above
            check_object(document)


@pytest.mark.parametrize(
    ("schema", "path"), [(JOB_SET, ("spec", "failurePolicy")), (HYPERPOD_JOB, ("spec", "runPolicy"))]
)
def test_the_schemas_written_here_refuse_unknown_fields(schema: dict[str, Any], path: tuple[str, ...]) -> None:
    target = "jobset" if schema is JOB_SET else "hyperpod-sagemaker"
    case = next(case for case in CASES if case[0] == f"eks-llama2-7b.{target}")
    document = next(d for d in objects_of(files_of(case)) if d["kind"] in ("JobSet", "HyperPodPyTorchJob"))
    document[path[0]][path[1]]["backoffLimt"] = 3
    with pytest.raises(AssertionError, match="backoffLimt"):
        check_strictly(document, schema)


@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
@pytest.mark.parametrize("target", ["jobset", "indexed-job", "pytorchjob", "trainjob"])
def test_gangs_are_groups_of_all_nodes(gang: str, target: str) -> None:
    documents = list(objects_of(render(place(GPU_EXAMPLE, [f"cluster.gang={gang}"], target))))
    text = str(documents)
    groups = {d["metadata"]["name"]: d for d in documents if d["kind"] == "PodGroup"}
    assert f"{documents[0]['metadata']['labels']['argosy/run']}-preflight" in groups, "its pods wait for each other too"
    for group in groups.values():
        check_strictly(group, POD_GROUPS[gang])
        assert group["spec"]["minMember"] == 2
    for job in [d for d in documents if d["kind"] in ("Job", "JobSet")]:
        for template in _templates(job):
            if template["spec"].get("schedulerName"):
                metadata = template["metadata"]
                member = {**metadata["labels"], **metadata["annotations"]}.keys()
                assert {"scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group"} & member
    if target in ("jobset", "indexed-job"):
        assert len(groups) == 2
    elif target == "pytorchjob":
        assert "'schedulingPolicy': {'minAvailable': 2}" in text
    else:
        assert f"'podGroupPolicy': {{'{gang}'" in text


def _templates(node: Any) -> Iterable[dict[str, Any]]:
    """Every pod template inside an object."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for child in node.values():
            yield from _templates(child)
    elif isinstance(node, list):
        for child in node:
            yield from _templates(child)


def test_a_rack_of_one_nvlink_domain_claims_its_channel() -> None:
    rack = ["cluster.instance=p6e-gb200.36xlarge", "parallel.dp_shard=2", "cluster.cpus=100", "cluster.memory=800Gi"]
    documents = list(objects_of(render(place(GPU_EXAMPLE, rack))))
    domain, *more = [d for d in documents if d["kind"] == "ComputeDomain"]
    assert more == [domain], "preflight needs it before training does"
    assert documents.index(domain) < next(n for n, d in enumerate(documents) if list(pods_of(d)) and "claims" in str(d))
    assert domain["spec"]["numNodes"] == 2
    job = next(d for d in documents if d["kind"] == "JobSet")
    [pod] = pods_of(job)
    template = pod["resourceClaims"][0]["resourceClaimTemplateName"]
    assert template == domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": pod["resourceClaims"][0]["name"]}]
    assert "NCCL_MIN_NCHANNELS" not in str(pod)
    [term] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "nvidia.com/gpu.clique"

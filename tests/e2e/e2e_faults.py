"""Faults of a cluster that scenarios need: a user without rights, and an operator that is too old."""

from __future__ import annotations

import base64
import contextlib
import functools
import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from e2e_cluster import E2eCluster


def kubeconfig_without_rights(cluster: E2eCluster) -> str:
    """Return a kubeconfig of a service account that may do nothing."""
    cluster.core.create_namespaced_service_account(cluster.namespace, {"metadata": {"name": "nobody"}})
    asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
    token = cluster.core.create_namespaced_service_account_token("nobody", cluster.namespace, asked).status.token
    trust: dict[str, Any] = {"insecure-skip-tls-verify": True}
    if cluster.server.ssl_ca_cert:
        authority = base64.b64encode(Path(cluster.server.ssl_ca_cert).read_bytes()).decode()
        trust = {"certificate-authority-data": authority}
    if cluster.server.tls_server_name:
        trust["tls-server-name"] = cluster.server.tls_server_name
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "nobody",
        "contexts": [{"name": "nobody", "context": {"cluster": "c", "user": "nobody", "namespace": cluster.namespace}}],
        "clusters": [{"name": "c", "cluster": {"server": cluster.server.host, **trust}}],
        "users": [{"name": "nobody", "user": {"token": token}}],
    }
    path = cluster.directory / "nobody.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return str(path)


@contextlib.contextmanager
def without_field(cluster: E2eCluster, crd: str, version: str, where: str, field: str) -> Iterator[None]:
    """Take a field out of the schema of a CRD, as in an older release of its operator, and put it back afterwards."""
    found = cluster.crds.api_client.sanitize_for_serialization(cluster.crds.read_custom_resource_definition(crd))
    at = next(i for i, one in enumerate(found["spec"]["versions"]) if one["name"] == version)
    schema = found["spec"]["versions"][at]["schema"]["openAPIV3Schema"]
    kept = functools.reduce(operator.getitem, where.split("/"), schema).get(field)
    assert kept is not None, f"{crd} has no {field}: it is too old, or a session that was killed took the field out"
    path = f"/spec/versions/{at}/schema/openAPIV3Schema/{where}/{field}"
    cluster.crds.patch_custom_resource_definition(crd, [{"op": "remove", "path": path}])
    try:
        # The server takes a moment to apply the new schema.
        time.sleep(5)
        yield
    finally:
        cluster.crds.patch_custom_resource_definition(crd, [{"op": "add", "path": path, "value": kept}])
        time.sleep(5)

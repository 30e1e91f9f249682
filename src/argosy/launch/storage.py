"""The shared volume: claims and storage classes for each cloud's stores. They are kept unless `reclaim` says otherwise: no uninstall deletes a checkpoint."""

from __future__ import annotations

from typing import Any

from argosy.config.cluster import StorageSpec
from argosy.errors import ArgosyError
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest

KEEP = {"helm.sh/resource-policy": "keep"}
# No label of a run, because several runs share a volume.
OURS = {"app.kubernetes.io/managed-by": "argosy"}

_BLOB_OPTIONS = [
    "-o allow_other",
    "--use-attr-cache=true",
    "--cancel-list-on-mount-seconds=10",
    "-o attr_timeout=120",
    "-o entry_timeout=120",
    "-o negative_timeout=120",
    "--log-level=LOG_WARNING",
    "--file-cache-timeout-in-seconds=120",
    "--block-cache",
    "--block-cache-block-size=32",
    "--block-cache-parallelism=80",
]
# Azure Managed Lustre is sold in steps that depend on its throughput (MB/s per TiB).
_LUSTRE_STEP_TIB = {"40": 48, "125": 16, "250": 8, "500": 4}
# The largest file system without a support request, and the zone where the spec names none.
_LUSTRE_MOST_TIB = {"40": 768, "125": 128, "250": 128, "500": 128}
_LUSTRE_SKU, _LUSTRE_ZONE = "AMLFS-Durable-Premium-125", "1"


def storage_objects(placed: Placement) -> list[Manifest]:
    """Return the storage class, volume and claim to create; nothing for an existing claim."""
    store = placed.storage
    makers = {"azure-lustre": _azure_lustre, "azure-blob": _azure_blob, "fsx": _fsx, "fsx-static": _fsx_static}
    if store.kind == "existing":
        _refuse_idle(store, set())
        return []
    if store.kind == "class":
        _refuse_idle(store, {"storage_class", "size"})
        if store.storage_class is None or store.size is None:
            raise _missing(
                "storage_class" if store.storage_class is None else "size", "a claim from a class needs both"
            )
        return [_claim(placed, store.storage_class, store.size)]
    return makers[store.kind](placed, store)


def _azure_lustre(placed: Placement, store: StorageSpec) -> list[Manifest]:
    network = {"subnet-name": "subnet", "vnet-name": "vnet", "vnet-resource-group": "vnet_resource_group"}
    optional = network | {"resource-group-name": "resource_group"}
    _refuse_idle(store, {"size", "sku", "zone", "mount_options", "reclaim", *optional.values()})
    sku = store.sku or _LUSTRE_SKU
    step = _LUSTRE_STEP_TIB.get(sku.rpartition("-")[2])
    if step is None:
        raise _missing("sku", f"{sku!r} is none of AMLFS-Durable-Premium-40, -125, -250, -500")
    size = store.size or f"{step}Ti"
    if not size.endswith("Ti") or int(size[:-2]) % step:
        raise ArgosyError(
            "launch.storage",
            f"{sku} is sold in steps of {step} TiB, and {size} is not a multiple",
            key="cluster.storage.size",
            value=size,
            fix=f"cluster.storage.size={step}Ti, {2 * step}Ti, …",
        )
    # `zone: ''` and `zone: null` are for regions without zones.
    zone = store.zone if "zone" in store.model_fields_set else _LUSTRE_ZONE
    parameters = {"sku-name": sku} | ({"zones": zone} if zone else {})
    parameters |= {"maintenance-day-of-week": "Sunday", "maintenance-time-of-day-utc": "02:00"}
    parameters |= {name: getattr(store, key) for name, key in optional.items() if getattr(store, key) is not None}
    made = _class(placed, "azurelustre.csi.azure.com", parameters, store.mount_options or ["noatime", "flock"])
    return [made, _claim(placed, made["metadata"]["name"], size)]


def size_note(store: StorageSpec) -> str | None:
    """Return what to ask of the cloud before a store of this size can be made, or None."""
    if store.kind != "azure-lustre" or store.size is None:
        return None
    sku = store.sku or _LUSTRE_SKU
    most = _LUSTRE_MOST_TIB[sku.rpartition("-")[2]]
    if int(store.size[:-2]) <= most:
        return None
    return (
        f"storage: a new {sku} has at most {most} TiB, and {store.size} are asked for: Azure raises the limit of a subscription "
        "by a support request, without which the claim stays Pending"
    )


def _azure_blob(placed: Placement, store: StorageSpec) -> list[Manifest]:
    _refuse_idle(store, {"size", "sku", "mount_options", "reclaim"})
    parameters = {"skuName": store.sku or "Standard_LRS"}
    made = _class(placed, "blob.csi.azure.com", parameters, store.mount_options or _BLOB_OPTIONS)
    return [made | {"allowVolumeExpansion": True}, _claim(placed, made["metadata"]["name"], store.size or "10Ti")]


def _fsx(placed: Placement, store: StorageSpec) -> list[Manifest]:
    _refuse_idle(store, {"size", "subnet", "security_groups", "throughput", "mount_options", "reclaim"})
    if store.subnet is None or not store.security_groups:
        raise _missing(
            "subnet" if store.subnet is None else "security_groups", "a file system lies in a subnet, behind groups"
        )
    parameters = {
        "subnetId": store.subnet,
        "securityGroupIds": ",".join(store.security_groups),
        "deploymentType": "PERSISTENT_2",
        "perUnitStorageThroughput": str(store.throughput or 250),
        "dataCompressionType": "LZ4",
        "fileSystemTypeVersion": "2.15",
    }
    made = _class(placed, "fsx.csi.aws.com", parameters, store.mount_options or ["flock"])
    return [made, _claim(placed, made["metadata"]["name"], store.size or "1200Gi")]


def _fsx_static(placed: Placement, store: StorageSpec) -> list[Manifest]:
    _refuse_idle(store, {"size", "volume", "dns_name", "mount_name", "mount_options", "reclaim"})
    for key in ("volume", "dns_name", "mount_name"):
        if getattr(store, key) is None:
            raise _missing(key, "an existing file system is known by its id, DNS name and mount name")
    size = store.size or "1200Gi"
    name = f"{placed.cluster.namespace}-{store.claim}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "labels": OURS, "annotations": KEEP},
        "spec": {
            "capacity": {"storage": size},
            "volumeMode": "Filesystem",
            "accessModes": ["ReadWriteMany"],
            "mountOptions": store.mount_options or ["flock"],
            "persistentVolumeReclaimPolicy": store.reclaim,
            "storageClassName": "",
            "csi": {
                "driver": "fsx.csi.aws.com",
                "volumeHandle": store.volume,
                "volumeAttributes": {"dnsname": store.dns_name, "mountname": store.mount_name},
            },
        },
    }
    claim = _claim(placed, "", size)
    claim["spec"]["volumeName"] = name
    return [volume, claim]


def _class(placed: Placement, provisioner: str, parameters: dict[str, str], options: list[str]) -> Manifest:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": f"{placed.cluster.namespace}-{placed.storage.claim}",
            "labels": OURS,
            "annotations": KEEP,
        },
        "provisioner": provisioner,
        "parameters": parameters,
        "mountOptions": options,
        "reclaimPolicy": placed.storage.reclaim,
        "volumeBindingMode": "Immediate",
    }


def _claim(placed: Placement, storage_class: str, size: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": placed.storage.claim,
            "namespace": placed.cluster.namespace,
            "labels": OURS,
            "annotations": KEEP,
        },
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": size}},
        },
    }


def _refuse_idle(store: StorageSpec, used: set[str]) -> None:
    """Refuse keys that this kind of store does not read."""
    always = {"claim", "mount", "kind", "take_ownership"}
    for key in store.model_fields_set - always - used:
        if getattr(store, key) not in (None, []):
            raise ArgosyError(
                "config.conflict",
                f"storage of kind {store.kind} has no use for {key}",
                key=f"cluster.storage.{key}",
                value=getattr(store, key),
                fix="leave it out, or choose the kind it belongs to",
            )


def _missing(key: str, cause: str) -> ArgosyError:
    return ArgosyError("config.missing-key", cause, key=f"cluster.storage.{key}", fix=f"give cluster.storage.{key}")

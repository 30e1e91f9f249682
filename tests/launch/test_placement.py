"""What cannot be launched is refused before a file is written, with the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rendering import GPU_EXAMPLE, HYPERPOD, ROOT, objects_of, pods_of

from argosy.errors import ArgosyError
from argosy.launch.names import object_name
from argosy.launch.place import place
from argosy.launch.render import render
from argosy.launch.storage import size_note


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (["cluster.instance=null"], "config.missing-key", "cluster.instance"),
        (["cluster.image=null"], "config.missing-key", "cluster.image"),
        (["cluster.storage=null"], "config.missing-key", "cluster.storage"),
        (["cluster.gpus=16"], "launch.resources", "cluster.gpus"),
        (["cluster.shm=2000Gi"], "launch.resources", "cluster.shm"),
        (["cluster.instance=DGX-H100", "cluster.nic_resource=a/b"], "launch.resources", "cluster.cpus"),
        (["cluster.instance=DGX-H100"], "launch.fabric", "cluster.nic_resource"),
        (["cluster.instance=p3.16xlarge"], "launch.fabric", "cluster.fabric"),
        (["cluster.instance=null", "cluster.gpus=8"], "launch.fabric", "cluster.fabric"),
        (["cluster.sharp=true"], "launch.fabric", "cluster.sharp"),
        (["cluster.nodes=3"], "launch.world-size", "parallel"),
        (["runs_dir=/tmp/runs"], "launch.not-shared", "runs_dir"),
        (["data.train.0.path=/corpora/a"], "launch.not-shared", "data.train.0.path"),
        (["cluster.target=hyperpod"], "config.conflict", "cluster.cloud"),
        (["cluster.target=hyperpod", "cluster.cloud=hyperpod"], "launch.namespace", "cluster.namespace"),
        (["cluster.instanc=p4d"], "config.unknown-key", "cluster.instanc"),
        (["cluster.storage={claim: a, sku: x}"], "config.conflict", "cluster.storage.sku"),
        (["cluster.storage={claim: a, kind: fsx}"], "config.missing-key", "cluster.storage.subnet"),
        (["cluster.storage={claim: a, kind: azure-lustre, size: 20Ti}"], "launch.storage", "cluster.storage.size"),
        (["cluster.target=local"], "config.conflict", "cluster.nodes"),
        (["name=seven-b."], "config.bad-value", "name"),
        (["cluster.image=r/argosy"], "launch.image", "cluster.image"),
        (["cluster.image=r:5000/argosy:latest"], "launch.image", "cluster.image"),
        (["cluster.env={A: b}", "cluster.secrets={A: s/k}"], "config.conflict", "cluster.env.A"),
        (["cluster.interface=^lo"], "config.bad-value", "cluster.interface"),
        (
            [*HYPERPOD, "cluster.target=hyperpod", "cluster.operator=sagemaker", "cluster.gang=volcano"],
            "config.conflict",
            "cluster.gang",
        ),
        ([f"name={'a' * 48}"], "launch.name-too-long", "name"),
    ],
)
def test_refusals_name_the_key(overrides: list[str], code: str, key: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        render(place(GPU_EXAMPLE, overrides))
    assert (refused.value.code, refused.value.key) == (code, key)
    assert refused.value.fix


def test_a_launch_with_the_wrong_number_of_nodes_is_told_the_right_one() -> None:
    with pytest.raises(ArgosyError) as refused:
        place(GPU_EXAMPLE, ["cluster.nodes=3"])
    assert "cluster.nodes=2, of 8 ranks each" in refused.value.fix
    assert "--nproc" not in refused.value.fix


def test_data_pods_tolerate_taints_and_prefer_nodes_without_gpus() -> None:
    def pod(*overrides: str) -> dict[str, Any]:
        files = render(place(GPU_EXAMPLE, overrides))
        [found] = [pod for job in objects_of({"a.yaml": files["20-prepare.yaml"]}) for pod in pods_of(job)]
        return found

    assert pod()["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    [preferred] = pod()["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["operator"] == "DoesNotExist"
    assert pod("cluster.data.tolerations=[cpu-pool]")["tolerations"] == [{"key": "cpu-pool", "operator": "Exists"}]


def test_a_new_volume_is_made_the_users_by_one_pod_with_one_capability_if_that_is_asked_for() -> None:
    assert "chown" not in str(render(place(GPU_EXAMPLE)))
    files = render(place(GPU_EXAMPLE, ["cluster.storage.take_ownership=true", "cluster.data.count=4"]))
    [job] = objects_of({"a.yaml": files["20-storage.yaml"]})
    [pod] = pods_of(job)
    [container] = pod["containers"]
    assert job["spec"]["completions"] == 1
    assert (container["command"], container["args"]) == (["chown"], ["1000:1000", container["workingDir"]])
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert list(files).index("20-storage.yaml") < list(files).index("30-prepare.yaml")
    for name, text in files.items():
        if name != "20-storage.yaml" and name.endswith(".yaml"):
            assert "runAsUser: 0" not in text
    assert "chown" not in str(render(place(GPU_EXAMPLE, ["cluster.storage.take_ownership=true"], "slurm")))


def test_a_store_lies_where_and_lives_as_long_as_the_spec_says() -> None:
    def store(text: str) -> list[dict[str, Any]]:
        return list(objects_of({"a.yaml": render(place(GPU_EXAMPLE, [f"cluster.storage={text}"]))["00-storage.yaml"]}))

    where = "subnet: lustre, vnet: spoke, vnet_resource_group: net, resource_group: files, zone: 2, reclaim: Delete"
    made, _ = store(f"{{claim: a, kind: azure-lustre, {where}}}")
    assert made["reclaimPolicy"] == "Delete"
    expected = {"subnet-name": "lustre", "vnet-name": "spoke", "vnet-resource-group": "net", "zones": "2"}
    assert (expected | {"resource-group-name": "files"}).items() <= made["parameters"].items()
    zones = {
        text: store(f"{{claim: a, kind: azure-lustre{text}}}")[0]["parameters"].get("zones")
        for text in ("", ", zone: ''", ", zone: null")
    }
    assert list(zones.values()) == ["1", None, None], "a region may have no zones"
    assert store("{claim: a, kind: azure-blob, reclaim: Delete}")[0]["reclaimPolicy"] == "Delete"
    assert store("{claim: a, kind: azure-blob}")[0]["reclaimPolicy"] == "Retain"


@pytest.mark.parametrize(
    ("size", "sku", "most"),
    [("128Ti", "125", None), ("144Ti", "125", 128), ("768Ti", "40", None), ("816Ti", "40", 768), ("512Ti", None, 128)],
)
def test_a_file_system_that_needs_a_support_request_is_said_to(size: str, sku: str | None, most: int | None) -> None:
    tier = "" if sku is None else f", sku: AMLFS-Durable-Premium-{sku}"
    placed = place(GPU_EXAMPLE, [f"cluster.storage={{claim: a, kind: azure-lustre, size: {size}{tier}}}"])
    note = size_note(placed.storage)
    assert (note is None) == (most is None)
    assert note is None or (f"at most {most} TiB" in note and "support request" in note)


def test_nodes_that_hide_their_topology_get_it_as_a_file_for_nccl() -> None:
    files = render(place(ROOT / "examples" / "aks-gpt3-375m.yaml"))
    [spec] = objects_of({"a.yaml": files["10-spec.yaml"]})
    system = ElementTree.fromstring(spec["data"]["nccl-topology.xml"])
    assert [cpu.get("affinity") for cpu in system] == ["00000000,0000ffff,ffffffff", "ffffffff,ffff0000,00000000"]
    classes = [[device.get("class") for device in switch] for cpu in system for switch in cpu]
    assert classes == 8 * [["0x030200", "0x020700"]], "a GPU and the card beside it on each of eight switches"
    buses = [device.get("busid") for device in system.iter("pci")]
    assert len(set(buses)) == 24
    [train] = [d for d in objects_of({"a.yaml": files["50-train.yaml"]}) if list(pods_of(d))]
    for pod in pods_of(train):
        env = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
        assert env["NCCL_TOPO_FILE"] == "/etc/argosy/nccl-topology.xml"
        assert "NCCL_NET_GDR_LEVEL" not in env
    assert "nccl-topology" not in str(render(place(GPU_EXAMPLE)))


def test_a_run_spec_without_a_cluster_says_what_to_add() -> None:
    with pytest.raises(ArgosyError, match="does not say where") as refused:
        place(ROOT / "examples" / "gpt2-small.yaml")
    assert "cluster:" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "expected"), [("gpt3-7.5b", "gpt3-7-5b"), ("GPT_3", "gpt-3"), ("7b", "run-7b"), ("a-", "a")]
)
def test_names_become_dns_labels(name: str, expected: str) -> None:
    assert object_name(name) == expected


@pytest.mark.parametrize("target", ["jobset", "pytorchjob", "trainjob", "indexed-job"])
def test_names_stay_within_63_characters_after_what_operators_append(target: str) -> None:
    suffixes = {
        "jobset": "-node-0-1-abcde", "trainjob": "-node-0-1-abcde", "pytorchjob": "-worker-0", "indexed-job": "-1-abcde",
    }  # fmt: skip
    longest = 63 - max(len(suffixes[target]), len("-preflight-1-abcde"))
    place_named = lambda length: render(place(GPU_EXAMPLE, [f"name={'a' * length}"], target))  # noqa: E731
    assert place_named(longest)
    with pytest.raises(ArgosyError) as refused:
        place_named(63 - len(suffixes[target]) + 1)
    assert refused.value.code == "launch.name-too-long"


def test_tcp_is_there_when_it_is_asked_for_and_only_then() -> None:
    tcp = place(GPU_EXAMPLE, ["cluster.fabric=tcp"])
    [pod] = pods_of(next(d for d in objects_of(render(tcp)) if d["kind"] == "JobSet"))
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment["NCCL_NET"] == "Socket"
    assert not any("efa" in key for key in pod["containers"][0]["resources"]["limits"])
    [pod] = pods_of(next(d for d in objects_of(render(place(GPU_EXAMPLE))) if d["kind"] == "JobSet"))
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment["NCCL_NET"] == "Libfabric"


def test_no_variable_is_set_that_does_nothing_or_harm() -> None:
    harmful = {
        "NCCL_TIMEOUT", "TORCH_DISTRIBUTED_TIMEOUT", "FI_PROVIDER", "NCCL_PROTO", "FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE",
        "NCCL_P2P_DISABLE", "CUDA_LAUNCH_BLOCKING", "NCCL_NVLS_ENABLE", "FI_EFA_USE_DEVICE_RDMA", "CUDA_DEVICE_MAX_CONNECTIONS",
    }  # fmt: skip
    for path in (GPU_EXAMPLE, ROOT / "examples" / "aks-gpt3-175b.yaml"):
        for document in objects_of(render(place(path))):
            for pod in pods_of(document):
                names = {entry["name"] for entry in pod["containers"][0]["env"]}
                assert not names & harmful


def test_sharp_is_on_only_when_asked_for() -> None:
    path = ROOT / "examples" / "aks-gpt3-375m.yaml"
    for asked in (False, True):
        text = str(list(objects_of(render(place(path, [f"cluster.sharp={str(asked).lower()}"])))))
        assert ("NCCL_COLLNET_ENABLE" in text) is asked


def test_what_the_user_sets_is_laid_over_our_own_but_not_over_the_targets() -> None:
    env = "cluster.env={NCCL_DEBUG: INFO, MASTER_ADDR: elsewhere}"
    [pod] = pods_of(next(d for d in objects_of(render(place(GPU_EXAMPLE, [env]))) if d["kind"] == "JobSet"))
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["MASTER_ADDR"] == "techpulse-7b-node-0-0.techpulse-7b"


def test_one_node_needs_no_fabric(tmp_path: Path) -> None:
    placed = place(GPU_EXAMPLE, ["cluster.nodes=1", "parallel.dp_replicate=1", *HYPERPOD])
    assert placed.fabric == "none"
    [pod] = pods_of(next(d for d in objects_of(render(placed)) if d["kind"] == "JobSet"))
    assert "NCCL_NET" not in str(pod)


@pytest.mark.parametrize(
    ("store", "kinds"),
    [
        ("{claim: a, mount: /shared}", []),
        ("{claim: a, mount: /shared, kind: class, storage_class: fast, size: 5Ti}", ["PersistentVolumeClaim"]),
        ("{claim: a, mount: /shared, kind: azure-blob}", ["StorageClass", "PersistentVolumeClaim"]),
        (
            "{claim: a, mount: /shared, kind: fsx, subnet: subnet-1, security_groups: [sg-1]}",
            ["StorageClass", "PersistentVolumeClaim"],
        ),
        (
            "{claim: a, mount: /shared, kind: fsx-static, volume: fs-1, dns_name: fs-1.fsx.aws, mount_name: abc}",
            ["PersistentVolume", "PersistentVolumeClaim"],
        ),
    ],
)
def test_what_is_stored_outlives_the_run(store: str, kinds: list[str]) -> None:
    files = render(place(GPU_EXAMPLE, [f"cluster.storage={store}"]))
    made = [d for d in objects_of({"a.yaml": files.get("00-storage.yaml", "")}) if d]
    assert [document["kind"] for document in made] == kinds
    for document in made:
        assert document["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        policy = document.get("reclaimPolicy") or document["spec"].get("persistentVolumeReclaimPolicy", "Retain")
        assert policy == "Retain"


def test_an_image_by_its_tag_is_looked_for_again_and_one_by_its_digest_or_loaded_on_nodes_is_not() -> None:
    policies = {
        "r:5000/argosy:1.2": "Always",
        f"r/argosy@sha256:{'0' * 64}": "IfNotPresent",
        "localhost/argosy:1.2": "IfNotPresent",
        "localhost:5000/argosy:1.2": "Always",
    }
    for image, policy in policies.items():
        assert pull_policies(f"cluster.image={image}") == {policy}
    assert pull_policies("cluster.image=r/argosy:1.2", "cluster.pull_policy=IfNotPresent") == {"IfNotPresent"}


def pull_policies(*overrides: str) -> set[str]:
    return {
        pod["containers"][0]["imagePullPolicy"]
        for document in objects_of(render(place(GPU_EXAMPLE, list(overrides))))
        for pod in pods_of(document)
    }


CPUS = [
    "cluster.instance=null",
    "cluster.gpus=0",
    "cluster.cpus=8",
    "cluster.memory=16Gi",
    "parallel.dp_replicate=1",
    "parallel.dp_shard=1",
]


def test_nodes_without_gpus_need_no_fabric_and_take_the_interface_they_are_given() -> None:
    placed = place(GPU_EXAMPLE, [*CPUS, "cluster.interface=eth1"])
    assert placed.fabric == "none"
    for document in objects_of(render(placed)):
        for pod in pods_of(document):
            environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
            assert not [name for name in environment if name.startswith("NCCL")]
            assert environment.get("GLOO_SOCKET_IFNAME") == ("eth1" if "ARGOSY_WORKERS" not in environment else None)


def test_a_variable_from_a_secret_takes_the_place_of_our_own() -> None:
    for document in objects_of(render(place(GPU_EXAMPLE, ["cluster.secrets={HF_HOME: s/k}"]))):
        for pod in pods_of(document):
            assert [entry["name"] for entry in pod["containers"][0]["env"]].count("HF_HOME") == 1


def test_a_part_of_a_nodes_gpus_comes_with_that_part_of_the_rest() -> None:
    whole, half = place(GPU_EXAMPLE), place(GPU_EXAMPLE, ["cluster.gpus=4", "parallel=auto"])
    assert (whole.gpus, whole.cpus, whole.memory_gib, whole.nics) == (8, 86, 1036, ("vpc.amazonaws.com/efa", 4))
    assert (half.gpus, half.cpus, half.memory_gib, half.nics) == (4, 43, 518, ("vpc.amazonaws.com/efa", 2))


BIG = ["model=gpt3-175b", "data.seq_len=2048", "train.global_batch=64"]


def test_what_does_not_fit_is_refused_with_the_arithmetic_unless_one_insists() -> None:
    """A layout of the user's own, far beyond the memory of 16 GPUs."""
    layout = [*BIG, "parallel.dp_replicate=1", "parallel.dp_shard=16", "parallel.tp=1"]
    with pytest.raises(ArgosyError) as refusal:
        place(GPU_EXAMPLE, layout)
    assert refusal.value.code == "plan.does-not-fit"
    assert refusal.value.key == "parallel"
    for part in ("weights", "gradients", "optimiser", "GiB", "--oversized"):
        assert part in str(refusal.value)
    placed = place(GPU_EXAMPLE, layout, oversized=True)
    assert placed.prediction is not None
    assert not placed.prediction["fits"]


def test_a_part_of_a_node_is_planned_like_a_whole_one() -> None:
    with pytest.raises(ArgosyError) as refusal:
        place(GPU_EXAMPLE, [*BIG, "cluster.gpus=4", "parallel.dp_replicate=1", "parallel.dp_shard=8", "parallel.tp=1"])
    assert refusal.value.code == "plan.does-not-fit"
    half = place(GPU_EXAMPLE, ["cluster.gpus=4", "parallel=auto"]).prediction
    assert half is not None
    assert half["fits"]


def test_what_fits_in_no_layout_is_refused_too() -> None:
    with pytest.raises(ArgosyError) as refusal:
        place(GPU_EXAMPLE, [*BIG, "parallel=auto"])
    assert refusal.value.code == "plan.does-not-fit"

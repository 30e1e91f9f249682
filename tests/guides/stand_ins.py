"""Stand-ins for programs that need a cloud, for the commands of guides: each call is recorded, and held to what the program takes.

`aws` is held to botocore's models of the services, `kubectl` and `helm` to the verbs and options of their references, objects to their
schemas (`crds.check_object`), and charts of this tree are rendered by helm itself where there is one. `az`, `eksctl` and `docker` publish no
models: the options below are from their references.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import yaml
from botocore import xform_name
from crds import check_object

from programs import tool

PROGRAMS = ("az", "aws", "eksctl", "docker", "kubectl", "helm", "git", "curl", "cosign", "deploy-aks.sh")
DIGEST = f"sha256:{'0' * 64}"
# Records its words and its input, and answers what later commands of a guide need.
_SCRIPT = r"""#!/bin/bash
call=$(mktemp "$CALLS/XXXXXXXX")
name=${0##*/}
printf '%s\0' "$name" "$@" > "$call"
case " $* " in *" -f - "*) cat > "$call.stdin" ;; *" --password-stdin "*) cat > "$call.secret" ;; *" --stdin "*) cat > /dev/null ;; esac
case "$name $1" in
  "docker inspect") last=${@: -1}; echo "${last%:*}@DIGEST" ;;
  "git clone")
    into=${2##*/}/infrastructure_references/aks/scripts
    mkdir -p "$into" && cp "$0" "$into/deploy-aks.sh" ;;
  "az "*|"aws "*|"kubectl get") echo an-answer ;;
esac
""".replace("DIGEST", DIGEST)
_AZ_GROUP, _AZ_EVERYWHERE = "--resource-group --name", {"--query", "--output"}
AZ = {
    "account show": "",
    "acr create": f"{_AZ_GROUP} --sku",
    "acr login": "--name",
    "aks create": f"{_AZ_GROUP} --node-count --node-vm-size --enable-blob-driver --generate-ssh-keys --location",
    "aks get-credentials": _AZ_GROUP,
    "aks nodepool add": f"{_AZ_GROUP} --cluster-name --node-count --node-vm-size --gpu-driver --labels",
    "aks nodepool scale": f"{_AZ_GROUP} --cluster-name --node-count",
    "aks show": _AZ_GROUP,
    "aks update": f"{_AZ_GROUP} --attach-acr --enable-blob-driver",
    "amlfs delete": f"{_AZ_GROUP} --yes",
    "amlfs list": "--resource-group",
    "feature register": "--namespace --name",
    "feature show": "--namespace --name",
    "group create": "--name --location",
    "group delete": "--name --yes",
    "provider register": "--namespace",
    "role assignment create": "--assignee-object-id --assignee-principal-type --role --scope",
    "storage account delete": f"{_AZ_GROUP} --yes",
    "storage account list": "--resource-group",
    "vm list-usage": "--location",
}
EKSCTL = {
    "create cluster": "-f",
    "delete cluster": "-f",
    "scale nodegroup": "--cluster --name --nodes",
}
DOCKER = {"build": "-f -t --build-arg", "inspect": "--format", "login": "--username --password-stdin", "push": "",
          "buildx imagetools inspect": "--format"}  # fmt: skip
COSIGN = {"verify": "--certificate-oidc-issuer --certificate-identity-regexp"}
_KUBE_EVERYWHERE = {"-n", "--namespace"}
KUBECTL = {
    "apply": "-f -k --server-side",
    "cp": "",
    "create namespace": "",
    "create secret generic": "--from-literal",
    "delete": "--all -f",
    "exec": "--stdin -- -c",
    "get": "-o",
    "rollout status": "",
    "wait": "--for --timeout --all",
}
HELM = {
    "dependencies update": "",
    "install": "--version --namespace --create-namespace --set",
    "repo add": "",
    "uninstall": "--namespace",
}
_RESOURCES = (
    "namespace",
    "node",
    "nodes",
    "persistentvolume",
    "persistentvolumeclaim",
    "pod",
    "storageclass",
    "localqueue",
)
_NODE_GROUP = ("name", "instanceType", "desiredCapacity", "availabilityZones", "privateNetworking", "efaEnabled")
CLUSTER_CONFIG = {"apiVersion", "kind", "metadata", "availabilityZones", "iam", "addons", "managedNodeGroups"}


@dataclass(frozen=True)
class Call:
    """One call of a program, with what it read from standard input."""

    program: str
    words: tuple[str, ...]
    stdin: str | None

    @property
    def options(self) -> set[str]:
        return {word.partition("=")[0] for word in self.words if word.startswith("-") and word != "-"}

    def __str__(self) -> str:
        return " ".join((self.program, *self.words))


class StandIns:
    """Programs in a directory that record their calls."""

    def __init__(self, directory: Path, calls: Path) -> None:
        self.calls = calls
        calls.mkdir()
        for name in PROGRAMS:
            path = directory / name
            path.write_text(_SCRIPT)
            path.chmod(0o755)

    def recorded(self) -> list[Call]:
        found = []
        for path in sorted(self.calls.iterdir()):
            if path.suffix:
                continue
            program, *words = path.read_text().removesuffix("\0").split("\0")
            stdin = path.with_name(f"{path.name}.stdin")
            found.append(Call(program, tuple(words), stdin.read_text() if stdin.exists() else None))
        return found


def check_call(call: Call, root: Path) -> None:
    """Hold a call to what its program takes. `root` is the directory the guide's commands ran in."""
    if call.program == "aws":
        check_aws(call.words)
    elif call.program == "az":
        _check_options(call, AZ, _AZ_EVERYWHERE)
    elif call.program == "eksctl":
        _check_options(call, EKSCTL, set())
        for number, word in enumerate(call.words):
            if word == "-f":
                _check_cluster_config(yaml.safe_load((root / call.words[number + 1]).read_text()))
    elif call.program == "docker":
        _check_options(call, DOCKER, set())
        files = [root / call.words[i + 1] for i, word in enumerate(call.words) if word == "-f"]
        assert all(path.exists() for path in files), f"{call}: there is no such Dockerfile"
    elif call.program == "cosign":
        _check_options(call, COSIGN, set())
    elif call.program == "kubectl":
        _check_kubectl(call)
    elif call.program == "helm":
        _check_helm(call, root)
    elif call.program == "deploy-aks.sh":
        assert call.words[0] in ("install-network-operator", "install-gpu-operator", "install-pytorch-operator"), str(
            call
        )
    else:
        assert re.search(r"https://(github\.com|raw\.githubusercontent\.com)/\S+", str(call)), str(call)


def _check_options(call: Call, known: dict[str, str], everywhere: set[str]) -> None:
    """Find the longest known command that a call begins with, and refuse options it does not have."""
    text = " ".join(call.words)
    verbs = [verb for verb in known if text == verb or text.startswith(f"{verb} ")]
    assert verbs, f"{call.program} has no command for: {call}"
    unknown = call.options - set(known[max(verbs, key=len)].split()) - everywhere
    assert not unknown, f"{call}: no option {', '.join(sorted(unknown))}"


def check_aws(words: tuple[str, ...]) -> None:
    """Hold a call of the AWS command line to the service's own model."""
    service, command, *_ = words
    options = {word[2:] for word in words if word.startswith("--")} - {"query", "output", "region"}
    if (service, command) == ("ecr", "get-login-password"):
        assert not options
        return
    model: Any = botocore.session.get_session().get_service_model(service)
    operations = {xform_name(name, "-"): name for name in model.operation_names}
    assert command in operations, f"aws {service} has no command {command}"
    shape = model.operation_model(operations[command]).input_shape
    members = {xform_name(name, "-"): name for name in shape.members}
    assert options <= members.keys(), f"aws {service} {command}: no option {options - members.keys()}"
    missing = [name for name in shape.required_members if xform_name(name, "-") not in options]
    assert not missing, f"aws {service} {command} needs {missing}"


def _check_cluster_config(document: dict[str, Any]) -> None:
    assert document["apiVersion"] == "eksctl.io/v1alpha5"
    assert document.keys() <= CLUSTER_CONFIG
    zones = document["availabilityZones"]
    assert len(set(zones)) >= 2, "EKS wants subnets in two zones"
    for group in document["managedNodeGroups"]:
        assert group.keys() <= set(_NODE_GROUP), group
        assert set(group.get("availabilityZones", [])) <= set(zones), "a zone without a subnet"
        # EFA's cards are in one subnet, without a public address.
        assert not group.get("efaEnabled") or (group["privateNetworking"] and len(group["availabilityZones"]) == 1)


def _check_kubectl(call: Call) -> None:
    _check_options(call, KUBECTL, _KUBE_EVERYWHERE)
    if call.words[0] in ("get", "delete") and "-f" not in call.words:
        assert call.words[1] in _RESOURCES or call.words[-2] in _RESOURCES, str(call)
    if call.stdin is not None:
        for document in yaml.safe_load_all(call.stdin):
            check_object(document)


def _check_helm(call: Call, root: Path) -> None:
    _check_options(call, HELM, set())
    if call.words[0] == "install" and call.words[2].startswith("charts/") and (program := tool("helm")) is not None:
        line = [program, "template", *call.words[1:]]
        done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for document in filter(None, yaml.safe_load_all(done.stdout)):
            check_object(document)

"""The guides' commands work: every command of a scenario and of launching.md is run, in a new directory with this tree's examples in it.

`sh` blocks run as they stand. In `console` blocks `argosy` talks to an emulated cluster, whose operators let every job succeed, and stand-ins
take the place of the clouds' own programs. Everything that is rendered on the way is held to the schemas of its kind.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from api_server import ApiServer
from crds import check_object
from emulated_operators import EmulatedOperators
from loopback_hub import Hub
from rendering import ROOT
from stand_ins import DIGEST, Call, StandIns, check_aws, check_call

import forking
from argosy.data.text.tokenizer import train_bpe
from argosy.record.jsonl import read_metrics

GUIDES = ("gpt3-on-aks", "mpt-on-aks", "llama-on-eks", "gpt3-on-hyperpod", "parallelism-lab")
# What a reader replaces by his own.
PLACEHOLDERS = {"sha256:…": DIGEST, " …": "", "cluster.image=…": f"cluster.image=r/argosy@{DIGEST}", "CLAIM": "claim"}
# Steps of other guides that a guide refers to.
EARLIER = f"export IMAGE=registry.example.org/argosy@{DIGEST} HF_TOKEN=a-token NODES=nodes-group\n"
# A run of the size of a laptop for launching.md, whose commands also start it here.
SMALL_RUN = """\
name: small
model: {family: gpt, layers: 1, hidden: 32, heads: 2, vocab_size: 257}
data: {tokenizer: bytes, train: [{path: corpus, prepare: {inputs: [text.jsonl]}}], seq_len: 32}
train: {global_batch: 4, steps: 10}
optim: {lr: 1.0e-3, warmup: 2}
eval: off
checkpoint: {every: 10ba}
cluster: {target: jobset, gpus: 0, cpus: 1, memory: 2Gi, image: "r/argosy:1", storage: claim, namespace: training}
"""
FOUNDRY = {"model": {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 257}}


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> None:
    reader = kubernetes_validate.utils.schema_contents
    if not hasattr(reader, "cache_info"):
        kubernetes_validate.utils.schema_contents = cache(reader)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    running = ApiServer()
    running.write_config(tmp_path / "kubeconfig", namespace="default")
    # An administrator makes queues.
    for name in ("gpu-local-queue", "hyperpod-ns-research-localqueue"):
        running.objects["localqueues", name] = {"metadata": {"name": name}}
    yield running
    running.close()


def commands_of(guide: str, kinds: str = "sh|console") -> str:
    """Return the commands of a guide as one script."""
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    blocks = re.findall(rf"^```(?:{kinds})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    script = "\n".join(blocks)
    for placeholder, value in PLACEHOLDERS.items():
        script = script.replace(placeholder, value)
    return script


def run_commands(script: str, directory: Path) -> list[Call]:
    """Run a guide's commands in a directory as a reader finds it, and return the calls of stand-ins."""
    for name in ("examples", "docker", "charts"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "train.yaml").write_text(yaml.safe_dump(FOUNDRY))
    shutil.copytree(ROOT / "tests" / "data" / "golden_mds" / "plain", directory / "mds")
    # What a reader copies to a volume.
    for name in ("llama2-7b", "curated", "general"):
        (directory / name).mkdir()
        (directory / name / "file").write_text("content")
    (directory / "bin").mkdir()
    stand_ins = StandIns(directory / "bin", directory / "calls")
    environment = os.environ | {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(directory / "calls"),
        "KUBECONFIG": str(directory / "kubeconfig"),
    }
    line = ["bash", "-c", "set -euo pipefail\n" + EARLIER + script]
    with forking.command(directory / "bin"):
        done = subprocess.run(line, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return stand_ins.recorded()


def check_rendered(directory: Path) -> int:
    """Hold every rendered object to the schema of its kind, and return how many there are."""
    count = 0
    for path in sorted(directory.glob("**/[0-9][0-9]-*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            check_object(document)
            count += 1
    return count


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide: str, tmp_path: Path, server: ApiServer) -> None:
    # The lab's `console` blocks need GPUs, and have a test of their own.
    script = commands_of(guide, "sh" if guide == "parallelism-lab" else "sh|console")
    with EmulatedOperators(server) as operators:
        calls = run_commands(script, tmp_path)
    for call in calls:
        check_call(call, tmp_path)
    trained = list((tmp_path / "runs").glob("*/checkpoints/step-00000010"))
    assert trained
    for rendered in re.findall(r"-o (out/\S+)", script):
        assert (tmp_path / rendered / "plan.json").exists()
    assert check_rendered(tmp_path / "out") > 0
    on_a_cluster = [line for line in script.splitlines() if line.startswith("argosy launch") and "$IMAGE" in line]
    assert len(on_a_cluster) <= len(operators.finished)


def test_the_lab_on_two_gpus_runs_on_two_cores_with_a_smaller_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are those of the page. A loopback Hub has the data and the tokenizer, and the size is that of the page's laptop."""
    [small] = re.findall(r'^SMALL="(.*?)"$', commands_of("parallelism-lab", "sh"), re.DOTALL | re.MULTILINE)
    sizes = " ".join(word for word in small.split() if not word.startswith("data.train="))
    script = re.sub(r"^(argosy train .*)$", rf"\1 {sizes}", commands_of("parallelism-lab", "console"), flags=re.M)
    texts = [f"Sentence {n} of the lab, and no other." for n in range(400)]
    with Hub() as hub:
        first = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        hub.files["allenai/c4"]["en/c4-train.00000-of-01024.json.gz"] = gzip.compress(first.encode())
        hub.files["gpt2"]["tokenizer.json"] = train_bpe(texts, 300).encode()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("no_proxy", "*")
        run_commands(script, tmp_path)
    layouts = [re.sub(r".*/(\w+).yaml.*", r"\1", line) for line in script.splitlines() if "argosy train" in line]
    losses = {
        layout: {
            step: record["loss"] for step, record in read_metrics(run / "metrics.jsonl").items() if "loss" in record
        }
        for layout in layouts
        for run in [tmp_path / "runs" / f"lab-{layout}"]
    }
    assert len(losses) > 1
    assert all(found == pytest.approx(losses[layouts[0]], rel=1e-4) for found in losses.values())
    assert len(losses[layouts[0]]) == 10


def test_the_commands_of_launching_run(tmp_path: Path, server: ApiServer) -> None:
    (tmp_path / "run.yaml").write_text(SMALL_RUN)
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "Sentence {n}, and no other."}}\n' for n in range(200)))
    script = commands_of("launching").replace("--rank 9", "--rank 0")
    with EmulatedOperators(server) as operators:
        calls = run_commands(script, tmp_path)
    for call in calls:
        check_call(call, tmp_path)
    assert {"small-prepare", "small-preflight", "small"} <= set(operators.finished)
    assert (tmp_path / "runs/small/checkpoints/step-00000010").is_dir(), "--target local"
    assert check_rendered(tmp_path / "out") > 0
    assert {path.name for path in tmp_path.glob("*.yaml")} >= {"gpt.yaml", "mpt.yaml"}


@pytest.mark.parametrize(
    "words",
    ["fsx delete-file-system --file-system fs-0", "ecr make-repository --repository-name a", "fsx delete-file-system"],
)
def test_a_command_that_aws_does_not_have_is_noticed(words: str) -> None:
    with pytest.raises(AssertionError):
        check_aws(tuple(words.split()))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("az", "aks create --nodes 3"),
        ("az", "aks destroy --name a"),
        ("kubectl", "get persistentvolumeclaims-of"),
        ("helm", "install a b --versoin 1"),
        ("docker", "build -f docker/Dockerfile.missing ."),
    ],
)
def test_a_command_that_a_program_does_not_have_is_noticed(program: str, words: str) -> None:
    with pytest.raises(AssertionError):
        check_call(Call(program, tuple(words.split()), None), ROOT)


def test_every_launched_example_has_a_guide() -> None:
    guides = "".join((ROOT / "docs" / "guides" / f"{guide}.md").read_text() for guide in (*GUIDES, "launching"))
    for path in (ROOT / "examples").glob("*.yaml"):
        if "\ncluster:" in path.read_text() and not path.name.startswith("slurm"):
            assert f"examples/{path.name}" in guides, f"no guide speaks of {path.name}"


def test_parallelism_lab_renders_for_a_cluster(tmp_path: Path) -> None:
    """Its specs name no cluster: any of them is launched by adding one on the command line."""
    from argosy.launch.place import place
    from argosy.launch.render import render

    labs = sorted((ROOT / "examples" / "parallelism-lab").glob("*.yaml"))
    assert len(labs) >= 5
    cluster = (
        "cluster={target: jobset, gpus: %d, nodes: 1, cpus: 8, memory: 64Gi, image: r/argosy@sha256:0, storage: claim}"
    )
    for path in labs:
        gpus = 1 if path.stem == "baseline" else 2
        assert "JobSet" in "".join(render(place(path, [cluster % gpus])).values()), path.name

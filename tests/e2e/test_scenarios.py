"""A run on a real cluster ends with the same bits whatever happens to it, and is refused before it starts where it cannot work."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from e2e_cluster import TEST_LONGEST_S, Bits, E2eCluster, finish
from e2e_faults import kubeconfig_without_rights, without_field
from e2e_spec import MOUNT, STEPS, TARGETS

from argosy.launch.conduct import EXIT_STAGE_FAILED

GIVEN = os.environ.get("ARGOSY_E2E_TARGETS", "").replace(",", " ").split()
CHOSEN = GIVEN or list(TARGETS)
REFUSED = 2
JOBSET_CRD = "jobsets.jobset.x-k8s.io"
POLICY_RULE = "properties/spec/properties/failurePolicy/properties/rules/items/properties"
pytestmark = pytest.mark.timeout(TEST_LONGEST_S)
on_every_target = pytest.mark.parametrize("target", CHOSEN)


@pytest.fixture(autouse=True)
def _needs_its_operator(request: pytest.FixtureRequest, cluster: E2eCluster) -> None:
    """Skip a target whose operator the cluster does not have, unless the target was asked for by name."""
    target = request.node.callspec.params.get("target") if hasattr(request.node, "callspec") else None
    if target is not None and not GIVEN and (missing := cluster.missing_kind(target)) is not None:
        pytest.skip(f"this cluster does not know {missing}, which the target {target} needs")


@on_every_target
def test_a_run_goes_through_its_stages_and_ends_with_the_same_bits(
    cluster: E2eCluster, undisturbed: Bits, target: str
) -> None:
    name = f"plain-{target}"
    said = cluster.launch(name, target)
    assert "train done" in said
    assert cluster.bits(name) == undisturbed


DISTURBANCES: dict[str, Callable[[E2eCluster, str], None]] = {
    "kill": E2eCluster.kill_ranks,
    "delete": E2eCluster.delete,
    "drain": E2eCluster.evict,
}


@on_every_target
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_disturbed_run_ends_with_the_same_bits(
    cluster: E2eCluster, undisturbed: Bits, target: str, disturbance: str
) -> None:
    """The last pod is hit, and with it the rank that does not write the run directory."""
    name = f"{disturbance}-{target}"
    launching = cluster.start(name, target)
    DISTURBANCES[disturbance](cluster, cluster.pods(name)[-1])
    finish(launching)
    assert cluster.bits(name) == undisturbed
    events = cluster.read(f"runs/{name}/events.jsonl")
    assert '"resume"' in events or '"restart"' in events, "nothing happened to it"


@on_every_target
def test_a_stopped_run_saves_and_goes_on_when_launched_again(
    cluster: E2eCluster, undisturbed: Bits, target: str
) -> None:
    name = f"stop-{target}"
    launching = cluster.start(name, target)
    spec = cluster.write_spec(name, target)
    assert "stopped: saved at step" in cluster.say("stop", spec)
    assert "train stopped" in finish(launching, EXIT_STAGE_FAILED), "the launch that followed it has ended too"
    assert "saved at step" in cluster.say("status", spec)
    cluster.launch(name, target)
    assert cluster.bits(name) == undisturbed


@pytest.mark.parametrize("target", [target for target in CHOSEN if target != "pytorchjob"])
def test_a_run_that_refuses_ends_its_job_at_once(cluster: E2eCluster, target: str) -> None:
    """PyTorchJob restarts a refusal until its restarts are used up, which docs/guides/launching.md says."""
    name = f"refuse-{target}"
    said = cluster.launch(name, target, f"init_from=hf:{MOUNT}/nothing", code=EXIT_STAGE_FAILED)
    assert "refused to run (exit code 2)" in said
    cluster.wait(lambda: not cluster.pods(name), f"the end of the pods of {name}")


def test_a_node_that_fails_preflight_stops_the_chain(cluster: E2eCluster) -> None:
    said = cluster.launch("preflight", "indexed-job", "checkpoint.keep=1000000000", code=EXIT_STAGE_FAILED)
    assert "checkpoints need" in said
    assert not [job for job in cluster.jobs_of("preflight") if job == "preflight"], "training was started"


def test_a_volume_the_user_may_not_write_is_named(cluster: E2eCluster) -> None:
    cluster.make_volume("locked", "locked", shared=False)
    cluster.run_in("locked", "chown", "0:0", MOUNT)
    said = cluster.launch(
        "locked",
        "indexed-job",
        "--stage",
        "preflight",
        code=EXIT_STAGE_FAILED,
        storage={"claim": "locked", "mount": MOUNT},
    )
    assert f"user 1000 may not write {MOUNT}" in said
    assert "take_ownership" in said


def test_who_has_no_rights_is_told_before_anything_starts(cluster: E2eCluster) -> None:
    spec = cluster.write_spec("rights", "indexed-job")
    said = finish(cluster.argosy("launch", spec, kubeconfig=kubeconfig_without_rights(cluster)), REFUSED)
    assert "you lack the right to" in said
    assert "kubectl create role" in said
    assert not cluster.jobs_of("rights")


@pytest.mark.parametrize("target", [target for target in CHOSEN if target == "jobset"])
def test_an_old_jobset_is_refused_before_the_first_stage(cluster: E2eCluster, target: str) -> None:
    """A JobSet before 0.10 does not know a field that a run's failure policy needs; here the field is taken out of its schema."""
    with without_field(cluster, JOBSET_CRD, "v1alpha2", POLICY_RULE, "onJobFailureMessagePatterns"):
        said = finish(cluster.argosy("launch", cluster.write_spec("old", target)), REFUSED)
    assert "JobSet" in said
    assert not cluster.jobs_of("old")


def test_a_full_volume_stops_the_chain_and_the_run_goes_on_when_there_is_space(
    cluster: E2eCluster, undisturbed: Bits
) -> None:
    cluster.make_volume_in_memory("small", "small", "400Mi")
    cluster.run_in("small", "sh", "-c", f"dd if=/dev/zero of={MOUNT}/filler bs=1M count=500 || true")
    where = {"claim": "small", "mount": MOUNT}
    said = cluster.launch("full", "indexed-job", "--stage", "preflight", code=EXIT_STAGE_FAILED, storage=where)
    assert "space" in said.lower()
    cluster.run_in("small", "rm", f"{MOUNT}/filler")
    cluster.write_text("small")
    cluster.launch("full", "indexed-job", storage=where)
    assert cluster.bits("full", "small") == undisturbed


def test_a_run_is_read_from_outside_without_its_volume(cluster: E2eCluster, undisturbed: Bits) -> None:
    """It has ended: a node with two cores may have none free for a reader beside a run."""
    spec = cluster.write_spec("undisturbed", "indexed-job")
    assert f"step {STEPS}/{STEPS} | loss" in cluster.say("watch", spec, "--once")
    assert f"step {STEPS}/{STEPS} | loss" in cluster.say("watch", "undisturbed", "-n", cluster.namespace, "--once")
    assert f"{STEPS:,}" in cluster.say("ckpt", "ls", spec)
    cluster.say("report", spec)
    assert "undisturbed" in (cluster.directory / "undisturbed-report.html").read_text()
    cluster.wait(lambda: not cluster.pods("undisturbed", "read"), "the end of the readers")


def test_two_runs_side_by_side_do_not_touch_each_other(cluster: E2eCluster, undisturbed: Bits) -> None:
    """Each has its two ranks in one pod, so that both find room on a small node."""
    names = ("left", "right")
    launching = [cluster.argosy("launch", cluster.write_spec(n, "indexed-job", nodes=1, ranks=2)) for n in names]
    for process in launching:
        finish(process)
    for name in names:
        assert cluster.bits(name) == undisturbed

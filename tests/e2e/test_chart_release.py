"""The chart on a real cluster: its conductor takes a run to its end with its own rights, and uninstalling it keeps the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_cluster import CLAIM, TEST_LONGEST_S, Bits, E2eCluster
from e2e_spec import chart_values

pytestmark = pytest.mark.timeout(TEST_LONGEST_S)
CHART = Path(__file__).parents[2] / "charts" / "argosy"


def test_a_release_conducts_its_run_and_leaves_the_data_when_it_goes(
    cluster: E2eCluster, undisturbed: Bits, tmp_path: Path
) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(chart_values("chart", cluster.image, cluster.namespace, CLAIM)))
    cluster.helm("install", "chart", CHART, "--values", values)
    try:
        cluster.wait(lambda: cluster.conductor_ended("chart"), "the end of the conductor")
        assert cluster.bits("chart") == undisturbed
        cluster.wait(lambda: cluster.available("chart-tensorboard"), "TensorBoard")
    finally:
        cluster.helm("uninstall", "chart", "--wait")
    assert cluster.bits("chart") == undisturbed, "what the release made is gone, and the run is not"
    assert "done" in cluster.say("status", "chart", "-n", cluster.namespace)


def test_a_claim_that_a_release_made_outlives_it_and_is_taken_over_by_the_next(
    cluster: E2eCluster, tmp_path: Path
) -> None:
    values = tmp_path / "values.json"
    made = chart_values("kept", cluster.image, cluster.namespace, "made-by-chart")
    claim = {"create": True, "size": "1Gi", "storageClassName": cluster.storage_class or ""}
    values.write_text(json.dumps(made | {"claim": claim}))

    def identity() -> str:
        return str(
            cluster.core.read_namespaced_persistent_volume_claim("made-by-chart", cluster.namespace).metadata.uid
        )

    try:
        cluster.helm("install", "kept", CHART, "--values", values)
        first = identity()
        cluster.helm("uninstall", "kept", "--wait")
        assert identity() == first
        cluster.helm("install", "kept", CHART, "--values", values)
        assert identity() == first
        cluster.helm("uninstall", "kept", "--wait")
    finally:
        # A stage that the conductor had started meanwhile goes on without it.
        cluster.jobs.delete_collection_namespaced_job(
            cluster.namespace, label_selector="argosy/run=kept", propagation_policy="Background"
        )

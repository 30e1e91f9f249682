"""Scenario tests on a real cluster. Without a cluster and an image they are not collected.

`ARGOSY_E2E_KUBECONFIG` is the kubeconfig of an administrator of a cluster, `ARGOSY_E2E_IMAGE` an image of this tree, from a
registry or imported on the nodes under that name. `tests/e2e/kind-up` makes both. Optional:

- `ARGOSY_E2E_STORAGE_CLASS`: a class whose volumes many nodes can write. Default: a directory of one node, where all pods then run.
- `ARGOSY_E2E_TARGETS`: targets that have to be tested. Default: all; those without their operator in the cluster are skipped.
- `ARGOSY_E2E_NODES`: the pods of a run, 1 or 2, each of one core and 2 GiB. Default: 2 if the node has two free cores, else 1.
- `ARGOSY_E2E_KUBELET`: the kubelet's directory on the nodes. Default: /var/lib/kubelet.
- `ARGOSY_E2E_STEPS`: the steps of a run. Default: 1000, a minute of training on slow cores; more where a run ends before it can be disturbed.
- `ARGOSY_E2E_SECONDS`: how long one command or one change of the cluster may take. Default: 900.

The tests of the chart need helm. One test takes a field out of JobSet's CRD for some seconds, so nobody else should use JobSet meanwhile.
`kubectl delete namespace,pv -l argosy/e2e` removes what a killed session left.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

NEEDED = ("ARGOSY_E2E_KUBECONFIG", "ARGOSY_E2E_IMAGE")


def ignored(environ: dict[str, str]) -> list[str]:
    """Return the patterns of files that pytest leaves out."""
    return [] if all(environ.get(name) for name in NEEDED) else ["test_*.py"]


collect_ignore_glob = ignored(dict(os.environ))

if not collect_ignore_glob:
    from e2e_cluster import Bits, E2eCluster

    @pytest.fixture(scope="session")
    def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2eCluster]:
        """A namespace of its own with a volume that holds the texts; deleted at the end."""
        workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
        assert workers == "1", "the scenarios share a cluster: run them in one process, with -p no:xdist"
        made = E2eCluster.connect(dict(os.environ), tmp_path_factory.mktemp("e2e"))
        try:
            made.set_up()
            yield made
        finally:
            made.tear_down()

    @pytest.fixture(scope="session")
    def undisturbed(cluster: E2eCluster) -> Bits:
        """The weights, optimiser state and losses of a run that nothing happened to."""
        cluster.launch("undisturbed", "indexed-job")
        return cluster.bits("undisturbed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add what the namespace shows to the report of a failed test, and end its runs, so that the next test finds the cores free."""
        report = yield
        made = getattr(item, "funcargs", {}).get("cluster")
        if report.failed and made is not None:
            report.sections.append(("the namespace", made.last_words()))
        return report

"""Scenario tests on a real cluster. Without a cluster and an image they are not collected.

`ARGOSY_E2E_KUBECONFIG` is the kubeconfig of a cluster, `ARGOSY_E2E_IMAGE` an image of this tree, by digest. `tests/e2e/kind-up` makes both.
Optional: `ARGOSY_E2E_STORAGE_CLASS`, a class whose volumes many nodes can write (default: a directory of one node, where all pods then run),
`ARGOSY_E2E_TARGETS`, the targets whose operators are installed (default: all), and `ARGOSY_E2E_KUBELET`, the kubelet's directory on the
nodes (default: /var/lib/kubelet). A node needs 2 free cores and 6 GiB of memory; `ARGOSY_E2E_NODES=1` puts the ranks of a run in one pod and needs
half of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

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

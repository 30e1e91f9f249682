"""On GPUs only (`make test-gpu`): what the matrix cannot try on a CPU. The rest of the matrix runs there as it is, with NCCL."""

from __future__ import annotations

import numpy as np
import pytest

from dist.pool import Pool
from dist.test_matrix import COMPILED, reference, require_equal, run, sized

CLOSE = {"bf16": 3e-3, "fp16": 3e-3, "fp8": 1e-2}
LAYOUTS = ["dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_shard=2 tp=2", "dp_shard=2 ep=2"]


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_in_fewer_bits_follows_one_process(pool: Pool, layout: str, precision: str) -> None:
    """Closely, not to the last bits: a sum over ranks is rounded where one process rounds another."""
    model, keys = "moe" if "ep=" in layout else "llama", f"train.precision={precision}"
    expected = reference(model, sized(keys if "pp=" not in layout else f"{keys} model.layers=4"), 4)
    for trace in run(pool, model, f"{layout} {keys}", steps=4):
        np.testing.assert_allclose(trace.losses, expected.losses, rtol=CLOSE[precision])


@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize("layout", COMPILED)
def test_a_layout_compiled_for_this_gpu_computes_the_same(pool: Pool, layout: str, scope: str) -> None:
    require_equal("moe", layout, run(pool, "moe", f"{layout} compile={scope}"))


def test_a_step_that_is_captured_as_a_graph_computes_the_same() -> None:
    captured, launched = (reference("llama", sized(f"parallel.graph={graph}"), 4) for graph in ("auto", "off"))
    assert captured.losses == launched.losses

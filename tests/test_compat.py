"""Every process computes the same numbers, whatever its threads do at the first call, and hides no warning but those it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from argosy.compat import allow_fsdp_views
from argosy.compat.absent_peers import fake_ranks

# Each child is forked before anything is computed, and makes its first call of a vector function with two threads that are
# already running and do not sleep: they call it at the same time.
FIRST_CALLS = """
import os
import numpy as np
import torch
import argosy.compat
torch.set_num_threads(2)
values = torch.from_numpy(np.linspace(-3, 3, 1 << 13, dtype=np.float32))
wrong = 0
for _ in range(50):
    child = os.fork()
    if not child:
        for _ in range(20):
            values + 1
        os._exit(int(np.abs(values.exp().numpy() / np.exp(values.numpy()) - 1).max() > 1e-6))
    wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(wrong)
"""


def test_the_first_exponentials_of_a_process_are_as_exact_as_all_others() -> None:
    """Without `argosy.compat`, about one child in ten gets values with 11 bits of accuracy."""
    command, environment = [sys.executable, "-c", FIRST_CALLS], os.environ | {"OMP_WAIT_POLICY": "active"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=580, env=environment)
    assert int(done.stdout) == 0


class Passes(torch.nn.Module):
    """Returns its input, as a stage returns a stream that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_of_all_warnings_only_that_of_fsdp_about_views_is_silenced() -> None:
    said = "FSDP2-wrapped module (FSDPPasses) returned a view tensor."
    with fake_ranks(0, 2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def heard(do: Callable[[], object]) -> list[str]:
            caught.clear()
            do()
            return [str(warning.message)[: len(said)] for warning in caught]

        stage = fully_shard(Passes(), mesh=init_device_mesh("cpu", (2,)))
        stream = torch.zeros(8, requires_grad=True).view(2, 4)
        before = heard(lambda: stage(stream))
        allow_fsdp_views()
        # torch 2.11 has no such warning.
        assert heard(lambda: stage(stream)) == [text for text in before if text != said]
        assert heard(lambda: warnings.warn(said, UserWarning, stacklevel=1)) == [said]
        explicit = partial(warnings.warn_explicit, "another", UserWarning, "fsdp.py", 1, "torch.distributed.fsdp.api")
        assert heard(explicit) == ["another"]


# The matmul is for a CPU without bf16 instructions, where torch gives the warning itself.
SAID = """
import warnings
import torch
import argosy.compat
warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul: mkldnn_matmul bf16 path needs a cpu with bf16 support")
ones = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(ones, ones)
warnings.warn("another failed, switching to BLAS gemm")
"""


def test_the_fallback_of_a_16_bit_matmul_on_a_cpu_is_silent_and_other_warnings_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", SAID], check=True, capture_output=True, text=True, timeout=580)
    assert "mkldnn_matmul" not in done.stderr
    assert "UserWarning: another failed" in done.stderr

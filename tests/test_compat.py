"""Every process computes the same numbers, whatever its threads do at the first call."""

from __future__ import annotations

import os
import subprocess
import sys

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

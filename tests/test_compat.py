"""What torch needs before it computes the same numbers in every process."""

from __future__ import annotations

import subprocess
import sys

# Forked before anything is computed, each child makes its first call of a vector function, with two threads.
FIRST_CALLS = """
import os
import numpy as np
import torch
import argosy.compat
torch.set_num_threads(2)
values = torch.from_numpy(np.linspace(-3, 3, 1 << 16, dtype=np.float32))
wrong = 0
for _ in range(200):
    child = os.fork()
    if not child:
        os._exit(int(np.abs(values.exp().numpy() / np.exp(values.numpy()) - 1).max() > 1e-6))
    wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(wrong)
"""


def test_the_first_exponentials_of_a_process_are_as_exact_as_all_others() -> None:
    """Without `argosy.compat` about one child in thirty gets some with 11 bits."""
    command = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) == 0

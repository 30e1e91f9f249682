"""The order in which files of tests run. A long one that began last would be waited for by all workers but one."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
# Files that take half a minute or more come first. The first of them keeps all cores busy; those after it wait for other programs
# most of their time.
LONGEST = (
    "dist/test_matrix.py", "launch/test_slurm.py", "watch/test_browser.py", "launch/test_client.py", "record/test_sinks.py",
    "launch/test_hyperpod.py", "data/test_stream.py", "dist/test_runs.py", "guides/test_guide_commands.py", "launch/test_pods_run.py",
    "train/test_precision.py", "model/test_kernels.py", "data/test_prepare_sharing.py", "train/test_resume.py", "faults/test_storm.py",
)  # fmt: skip


def place(file: Path) -> int:
    """Number by which a file is sorted; all others come after the longest, in the order they were found."""
    name = str(file.relative_to(TESTS))
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)

"""The layouts of the examples are the planner's: none is slower than its choice, and none fills the memory to the brim."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.plan.advise import Question, answer

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHED = sorted(path for path in EXAMPLES.glob("*.yaml") if "\n  instance:" in path.read_text())
# The share of a GPU's memory that an example may be planned to use, and the share of time it may lose to the planner's choice:
# ranks whose state is sharded one way or another differ by less than the planner's error.
FULL, SLOWER = 0.95, 1.02


@pytest.mark.parametrize("path", LAUNCHED, ids=lambda path: path.stem)
def test_an_example_has_the_planners_layout(path: Path) -> None:
    nothing = dict.fromkeys(
        ("cluster", "global_batch", "seq_len", "tokens", "precision", "what_if", "price", "hardware")
    )
    advice = answer(Question.read(str(path), [], **nothing), top=1)
    own, best = advice.asked, advice.shown[0]
    assert own is not None, "the layout is not of the cluster's size"
    assert own.time.total <= SLOWER * best.time.total, "\n".join(advice.lines()[-3:])
    assert own.fullest.device <= FULL * own.cluster.gpu.memory

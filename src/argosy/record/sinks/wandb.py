"""Weights & Biases: one run there for one run here, however often it is started.

The run's id is kept in the run directory. Steps are W&B's own steps, which only grow: when a run goes back to a checkpoint, the
run there is rewound to the step before and goes on, so that no point of the dead attempt stays. Where the server cannot rewind,
and offline, where there is none, the run is resumed and the figures keep their own `step` axis. W&B_MODE and WANDB_API_KEY are
W&B's own; no key is read, kept or sent by us.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from argosy.record.jsonl import Record
from argosy.record.sinks.sink import AT_ONCE, RunFacts, missing, numbers, outcome

_log = logging.getLogger(__name__)


class WandB:
    name, source, at_once = "wandb", "metrics", AT_ONCE

    def __init__(self, run: RunFacts, project: str) -> None:
        self._facts = run
        self._entity, _, self._project = project.rpartition("/")
        self._run: Any = None
        self.newest = -1

    def open(self) -> None:
        try:
            import wandb
        except ImportError:
            raise missing("wandb", "wandb") from None
        self._wandb = wandb
        if self.newest < 0:  # else the first record tells whether it goes back
            self._start()

    def _start(self, rewound_to: int | None = None) -> None:
        facts = self._facts
        self._wait_for_a_directory()
        again: dict[str, Any] = {"resume": "allow"} if rewound_to is None else {}
        if rewound_to is not None:
            again = {"resume_from": f"{facts.run_id}?_step={rewound_to}"}
        self._run = self._wandb.init(
            entity=self._entity or None,
            project=self._project,
            id=None if rewound_to is not None else facts.run_id,
            name=facts.name,
            dir=str(facts.root),
            config=facts.spec,
            settings=self._wandb.Settings(
                console="off", x_disable_stats=True, x_disable_meta=True, init_timeout=30, silent=True
            ),
            **again,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _wait_for_a_directory(self) -> None:
        """W&B names a start's directory by its second, and writes over the files of an earlier start in the same one."""
        while any(self._facts.root.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{self._facts.run_id}")):
            time.sleep(0.05)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            step = record["step"]
            if step < self.newest or (step == self.newest and "loss" in record):
                self._rewind(step - 1)
            elif self._run is None:
                self._start()
            self.newest = step
            self._run.log({**numbers(record), "step": step}, step=step)

    def _rewind(self, step: int) -> None:
        if self._run is not None:
            self._run.finish()
        if self._wandb.setup().settings.mode not in ("offline", "dryrun"):
            try:
                self._start(rewound_to=step)
            except self._wandb.errors.Error as error:
                _log.warning("W&B does not rewind this run (%s); it keeps the dead attempt's points", error)
            else:
                return
        self._start()

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(outcome(self._facts) not in ("done", "interrupted")))
            self._run = None
            self._wandb.teardown()  # what was finished may still be in the memory of W&B's own process

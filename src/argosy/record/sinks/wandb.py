"""The Weights & Biases sink: a run is one W&B run, however often it is started.

The W&B run id is stored in the run directory. W&B's own steps only grow. When a run goes back to a checkpoint, the W&B run is
rewound to the step before, so that no point of the dead attempt stays. If the server cannot rewind, or W&B is offline, the
run is resumed and the metrics keep their own `step` axis. W&B itself reads WANDB_MODE and WANDB_API_KEY; Argosy neither reads
nor stores a key.
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
        # Otherwise the first record shows whether W&B has to rewind.
        if self.newest < 0:
            self._start()

    def _start(self, rewound_to: int | None = None) -> None:
        facts = self._facts
        self._wait_for_a_directory()
        resume: dict[str, Any] = {"resume": "allow"}
        if rewound_to is not None:
            resume = {"resume_from": f"{facts.run_id}?_step={rewound_to}"}
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
            **resume,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _wait_for_a_directory(self) -> None:
        """Wait until W&B's directory name is free: it has a resolution of one second, and W&B overwrites an existing one."""
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
                _log.warning("W&B cannot rewind this run (%s); it keeps the dead attempt's points", error)
            else:
                return
        self._start()

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(outcome(self._facts) not in ("done", "interrupted")))
            self._run = None
            # W&B's service process may still hold finished data in memory.
            self._wandb.teardown()

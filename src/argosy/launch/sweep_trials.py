"""`argosy sweep`: one run for each combination of override values, one after the other on this machine.

`optim.lr=1e-3,3e-3 model.layers=2,4` are four runs. Each is an `argosy train` of its own, in a directory of the sweep, so that a
sweep that was interrupted goes on with the same command and finished runs are not trained again.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from argosy.config.resolve import resolve
from argosy.errors import EXIT_DONE, EXIT_RESUMABLE, ArgosyError

_LONGEST_NAME = 63
_MOST_TRIALS = 1000


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, and the overrides that make it."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    path: Path
    # The directory of the runs.
    root: Path
    trials: tuple[Trial, ...]

    def command(self, trial: Trial, nproc: int | None) -> list[str]:
        """Return the `argosy` arguments of a trial."""
        ranks = [] if nproc is None else ["--nproc", str(nproc)]
        return ["train", str(self.path), *trial.overrides, f"name={trial.name}", f"runs_dir={self.root}", *ranks]


def plan_sweep(path: Path, overrides: Sequence[str]) -> Sweep:
    """Return the runs of a sweep, each checked as `argosy train` would.

    Raises:
        ArgosyError: no override has several values, there are too many runs, or one of them is refused.
    """
    choices = [(key, _values(text)) for key, _, text in (override.partition("=") for override in overrides)]
    varied = [key for key, values in choices if len(values) > 1]
    count = 1
    for _, values in choices:
        count *= len(values)
    if not varied or count > _MOST_TRIALS:
        raise ArgosyError(
            "config.bad-value",
            "no key has several values"
            if not varied
            else f"that would be {count:,} runs, and {_MOST_TRIALS:,} is the most",
            key="KEY=VALUE,VALUE",
            value=" ".join(overrides),
            fix="separate the values of a key with commas: optim.lr=1e-3,3e-3",
        )
    spec = resolve(path).spec
    trials = []
    for number, chosen in enumerate(itertools.product(*(values for _, values in choices)), 1):
        pairs = [(key, value) for (key, _), value in zip(choices, chosen, strict=True)]
        made = tuple(f"{key}={value}" for key, value in pairs)
        trial = Trial(_name(number, [(key, value) for key, value in pairs if key in varied]), made)
        resolve(path, [*made, f"name={trial.name}"])
        trials.append(trial)
    return Sweep(path, Path(spec.runs_dir) / f"{spec.name}-sweep", tuple(trials))


def run_sweep(sweep: Sweep, nproc: int | None, say: Callable[[str], None]) -> int:
    """Train each run in turn and return the exit code. A run that fails does not stop the others; an interruption does."""
    worst = EXIT_DONE
    for number, trial in enumerate(sweep.trials, 1):
        arguments = sweep.command(trial, nproc)
        say(f"run {number} of {len(sweep.trials)}: argosy {' '.join(arguments)}")
        code = subprocess.run([sys.executable, "-m", "argosy", *arguments], check=False).returncode
        code = code if code >= 0 else 128 - code
        if code == EXIT_RESUMABLE or code >= 128:
            return code
        if code != EXIT_DONE:
            say(f"{trial.name} ended with exit code {code}")
        worst = max(worst, code)
    return worst


def _values(text: str) -> list[str]:
    """Split at commas that are outside brackets and quotes: `[98,2,0]` is one value."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _name(number: int, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a name that says what varies, such as `lr-1e-3_layers-2`, or a number if that is too long."""
    told = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in pairs)
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", told).strip("-._")
    return clean if clean and len(clean) <= _LONGEST_NAME else f"trial-{number}"

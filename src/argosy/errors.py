"""Every refusal of Argosy: an error code, the key and value at fault, the cause with its arithmetic, and the fix.

One exception class serves the whole program. The codes are in one table, from which `docs/errors.md` is generated
(`python -m argosy.errors`); a test compares the two. The command line prints an `ArgosyError` as a short block and exits with
its `exit_code`; any other exception that escapes is a bug of Argosy.
"""

from __future__ import annotations

import sys
from typing import Final

from argosy.echo import VALUE_LIMIT, capped, redact, shorten

EXIT_DONE: Final = 0
EXIT_BUG: Final = 1
# The user must change something.
EXIT_REFUSED: Final = 2
# Interrupted with a checkpoint saved, shares of other workers are missing, or the file system failed: run the same command again.
EXIT_RESUMABLE: Final = 75

CODES: Final[dict[str, str]] = {
    "config.not-found": "The run spec file does not exist or cannot be read.",
    "config.bad-yaml": "The run spec is not valid YAML, repeats a key, or is larger than a run spec can be.",
    "config.bad-override": "A command-line override is not of the form `key.path=value`, or its path leads nowhere.",
    "config.unknown-key": "A key is not part of the run spec. Nothing is ever silently ignored.",
    "config.missing-key": "A key without a default was not given.",
    "config.bad-value": "A value has the wrong type, or lies outside what its key allows.",
    "config.unknown-preset": "The model preset does not exist; `argosy config models` lists those that do.",
    "config.conflict": "Two keys contradict each other.",
    "config.arithmetic": "The numbers cannot work together (batch, heads, hidden size, sequence length, layout).",
    "eval.half-off": "Evaluation was turned off by one setting while another still asks for it. `eval: off` is the switch.",
    "eval.missing-extra": "Tasks need the optional package lm-evaluation-harness.",
    "eval.unknown-task": "No task, group or tag of that name is known to lm-evaluation-harness or in the task directory.",
    "eval.bad-task": "A task cannot be run: its data is not here, its file is wrong, or it asks for something the back end cannot do.",
    "eval.no-decoder": "Tasks are scored by continuing a text, which only decoders do.",
    "data.not-found": "A data file or directory does not exist.",
    "data.bad-index": "An `.idx` file is missing, truncated, or does not describe its `.bin` file.",
    "data.bad-manifest": "A prepared corpus has a manifest that cannot be used.",
    "data.empty-split": "A split holds no document, or too few tokens for one sample.",
    "data.bad-input": "The input to `argosy data prepare` cannot be used.",
    "data.input-changed": "An input of `argosy data prepare` was truncated, appended to, rewritten or replaced since the job was planned.",
    "data.bad-template": "A chat template is missing, is not valid, or rewrites earlier turns of a conversation.",
    "data.wrong-task": "A corpus was prepared for another task than the run's.",
    "data.bad-records": "More records were quarantined than allowed, or no good document was left.",
    "data.write-failed": "Prepared data could not be written: the disk is full, or the directory read-only.",
    "data.interrupted": "The file system failed in a way that may pass, several times, while data was made. Exit code 75: the same command goes on.",
    "data.fetch-failed": "Remote data could not be fetched: the server kept failing, asked for too long a wait, or sent other content.",
    "data.fetch-refused": "A fetch was not started: no such data set, config, split or file, terms not accepted, or too little disk.",
    "data.corrupt": "A corpus does not match its manifest, or an `.idx` its `.bin`; `argosy data verify` lists every fault.",
    "data.bad-mds": "An MDS data set is damaged, names files outside its directory, or has a column that is not safe to read.",
    "data.cannot-merge": "The inputs of a merge differ in a way that one corpus cannot hold.",
    "data.missing-extra": "An optional Python package is needed for this input.",
    "data.worker-died": "A worker process of `argosy data prepare` was killed or crashed, most often for lack of memory.",
    "data.other-plan": "The output directory holds an unfinished preparation with other inputs or options.",
    "data.output-exists": "The output directory already holds a prepared corpus.",
    "data.truncated": "A `.bin` file ended before the tokens its `.idx` promises.",
    "tokenizer.not-found": "The tokenizer file does not exist or cannot be read as a tokenizer.",
    "tokenizer.failed": "The tokenizer fails on a text, as with a pattern that takes exponential time.",
    "tokenizer.no-eod": "The tokenizer has no end-of-document token that is known or was named.",
    "tokenizer.mismatch": "The data was prepared with another tokenizer than the run uses.",
    "tokenizer.vocabulary": "A token id does not fit in the model's vocabulary.",
    "run.exists": "The run directory already holds a run that this command would overwrite.",
    "run.not-found": "The run directory does not exist, or holds no checkpoint.",
    "run.unwritable": "The run directory cannot be written to.",
    "run.bad-note": "A tag or a note about a run is too long, or holds characters that a tag cannot have.",
    "run.changed": "The model, the data, the batch or the seed differ from those the run was started with.",
    "run.checkpoints-gone": "The run has saved checkpoints, and none of them is there any more.",
    "run.damaged": "The run directory's own record of its spec cannot be read.",
    "run.busy": "Another process is training in this run directory.",
    "checkpoint.corrupt": "No checkpoint of the run passes its integrity check.",
    "checkpoint.mismatch": "The checkpoint does not hold the tensors this model needs.",
    "checkpoint.save-failed": "A checkpoint could not be written.",
    "checkpoint.version": "A checkpoint was written by a newer version of Argosy.",
    "model.no-text": "The model is a retriever: it compares texts and cannot generate any.",
    "model.undeclared": "A module does not declare how its parameters may be sharded, which tensor or pipeline parallelism needs.",
    "hf.unsupported": "A Hugging Face model has a setting Argosy cannot represent, or a model of ours one they cannot.",
    "hf.bad-files": "A Hugging Face model directory lacks a file or tensor, or holds one that is damaged or not safe to read.",
    "hf.differs": "An exported model does not hold or compute what ours does; nothing was kept.",
    "hf.exists": "The directory to import or export to already holds something.",
    "hf.missing-extra": "An optional Python package is needed to talk to the Hugging Face Hub.",
    "hf.push-failed": "A model could not be uploaded to the Hugging Face Hub.",
    "hf.write-failed": "An imported or exported model could not be written.",
    "megatron.bad-files": "A Megatron checkpoint lacks a file or tensor, or holds one that is damaged, or that leads outside its directory.",
    "megatron.unsafe": "A pickle in a Megatron checkpoint names something that has no place there; nothing of it was run.",
    "megatron.unsupported": "A Megatron checkpoint has a format, a model or a setting that Argosy cannot represent.",
    "io.failed": "The operating system refused a file operation.",
    "log.missing-extra": "A sink needs an optional Python package.",
    "log.missing-variable": "A setting names an environment variable that is not set, or does not hold a web address.",
    "launch.environment": "The environment variables that give the rank and the world size are incomplete or contradict each other.",
    "launch.world-size": "There are more or fewer processes than the layout needs.",
    "launch.api": "The Kubernetes API server is not configured, or does not answer.",
    "launch.fabric": "The network between the nodes is not known, cannot do what is asked, or would silently be TCP.",
    "launch.image": "The container image has no tag or the tag `latest`, so that pods of one run may get different images.",
    "launch.missing-extra": "An optional Python package is needed to talk to a cluster.",
    "launch.name-too-long": "A run's name leaves no room for what Kubernetes and its operators append to it.",
    "launch.namespace": "The operator does not watch jobs in this namespace.",
    "launch.no-stage": "The run has no such stage.",
    "launch.not-found": "No launched run of that name is there, or it has no such pod.",
    "launch.not-shared": "A path that must outlive the pods is not on the shared volume.",
    "launch.refused": "The Kubernetes API server refused a request, or lacks an operator.",
    "launch.resources": "Cores, memory or GPUs of a pod are not known, or more than a node has.",
    "launch.running": "A job of that name is there already, with other settings or of another run.",
    "launch.secret": "The run spec contains what looks like a secret; give secrets by reference.",
    "launch.security": "A pod would have rights that were not asked for by name.",
    "launch.slurm": "Slurm's commands are not here, or refused the job.",
    "launch.storage": "The shared volume cannot be made as described.",
    "device.unavailable": "The device asked for is not present on this machine.",
    "device.out-of-memory": "The device has less memory than the model or a training step needs.",
    "device.no-graph": "A pass could not be captured as a CUDA graph, and cannot be launched after the attempt.",
    "device.broken-package": "An optional package for the device is installed and cannot be loaded.",
    "device.old-torch": "The installed torch is older than Argosy supports.",
    "plan.bad-cluster": "A cluster is not a number and a node type, as 2xp4d.24xlarge.",
    "plan.bad-facts": "A file of hardware facts cannot be used.",
    "plan.bad-log": "A training log has no step lines that the planner can read.",
    "plan.bad-question": "An option of `argosy plan` cannot be read.",
    "plan.does-not-fit": "No layout of the cluster has enough memory for the model.",
    "plan.missing-extra": "A plot needs an optional Python package.",
    "plan.no-layout": "No layout of the cluster divides the batch and the model.",
    "plan.unknown-hardware": "No GPU or instance type of that name is known; a file of your own can add it.",
    "train.non-finite": "The loss or the gradient norm became NaN or infinite, and skipping and rewinding did not help.",
    "train.diverged": "The loss or the gradient norm stayed far above the usual, and skipping and rewinding did not help.",
    "train.replica-mismatch": "Ranks that hold the same parameters repeatedly had different bits.",
    "watch.missing-extra": "The dashboard needs an optional Python package.",
    "watch.port-taken": "The dashboard's port cannot be used.",
}

# Codes of failures that the same command may not meet again.
_RESUMABLE: Final = frozenset({"data.interrupted"})


class ArgosyError(Exception):
    """A refusal that the user can act on.

    Args:
        code: a key of `CODES`.
        cause: what is wrong, with the numbers.
        fix: what to do about it.
        key, value: the setting at fault.
        origin: where the value comes from, as `run.yaml:27`.
    """

    def __init__(
        self,
        code: str,
        cause: str,
        *,
        fix: str,
        key: str | None = None,
        value: object = None,
        origin: str | None = None,
    ) -> None:
        if code not in CODES:
            raise KeyError(f"error code {code!r} is not in argosy.errors.CODES")
        self.code = code
        self.cause = capped(cause)
        self.fix = capped(fix)
        self.key = None if key is None else capped(key)
        super().__init__(self.cause)
        self.value = value
        self.origin = origin

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this error."""
        return EXIT_RESUMABLE if self.code in _RESUMABLE else EXIT_REFUSED

    def as_dict(self) -> dict[str, object]:
        """Return the fields for `--json` and for the event log."""
        return {
            "code": self.code,
            "key": self.key,
            "value": None if self.value is None else capped(str(self.value)),
            "origin": self.origin,
            "cause": self.cause,
            "fix": self.fix,
        }

    def __str__(self) -> str:
        lines = [f"error[{self.code}]"]
        if self.key is not None:
            shown = "" if self.value is None else f" = {_shown(self.value)}"
            where = "" if self.origin is None else f"   ({self.origin})"
            lines.append(f"  key    {self.key}{shown}{where}")
        lines.append(_labelled("cause", self.cause))
        lines.append(_labelled("fix", self.fix))
        return "\n".join(lines)


def _labelled(label: str, text: str) -> str:
    return f"  {label:<7}" + text.replace("\n", "\n         ")


def _shown(value: object) -> str:
    text = redact(value) if isinstance(value, str) else redact(str(value))
    return shorten(repr(text) if isinstance(value, str) else text, VALUE_LIMIT)


def errors_page() -> str:
    """Return the text of docs/errors.md."""
    rows = "\n".join(f'| <a id="{code}"></a>`{code}` | {meaning} |' for code, meaning in CODES.items())
    return (
        "# Error index\n\n"
        "<!-- Made from src/argosy/errors.py by `make docs`; edit the table there. -->\n\n"
        "Every refusal names its code, the key and value at fault, the cause with its arithmetic, and the fix, and ends\n"
        "the command with exit code 2, unless the table names another. `argosy --debug …` adds the traceback; verbs with `--json` print it as an object.\n\n"
        "| code | meaning |\n| --- | --- |\n" + rows + "\n\n"
        "## Exit codes\n\n"
        "| exit code | meaning |\n| --- | --- |\n"
        "| 0 | done |\n"
        "| 1 | a bug of ours |\n"
        "| 2 | refused: something must be changed first |\n"
        "| 3 | a launched stage failed |\n"
        "| 75 | interrupted, checkpoint saved, or shares of other workers are missing, or the file system failed: run the same command again to go on |\n"
        "| 130 | stopped at once by a second Ctrl-C, without saving |\n"
        "| ≥ 128 | killed by a signal (128 + its number) |\n"
    )


if __name__ == "__main__":
    sys.stdout.write(errors_page())

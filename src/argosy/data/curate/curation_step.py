"""A step of a curation pipeline, and the registry of all steps.

A step is a frozen pydantic model: its fields are its keys in the pipeline file. It sees a batch of documents and says which it
removes and why, and which texts it changes. Each kind of step is one module of this folder, registered under its name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from argosy.data.curate.text_batch import TextBatch

# Name of a step -> module of its class, `Step`. Modules are imported when a pipeline names them.
STEPS: dict[str, str] = {
    "field": "field_values",
    "language": "language_words",
    "length": "text_length",
    "gopher_quality": "gopher_quality",
    "gopher_repetition": "gopher_repetition",
    "fineweb_quality": "fineweb_quality",
    "c4_quality": "c4_quality",
    "mask_pii": "pii_masks",
    "decontaminate": "decontamination",
    "exact_duplicates": "exact_duplicates",
    "near_duplicates": "near_duplicates",
}


@dataclass
class StepResult:
    """What a step does to a batch: document number -> reason of its removal, and document number -> its new text."""

    removed: dict[int, str] = field(default_factory=dict)
    changed: dict[int, str] = field(default_factory=dict)


class CurationStep(BaseModel):
    """The base of all steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # True for steps that compare documents with each other. They come last in a pipeline.
    compares_documents: ClassVar[bool] = False

    def files(self) -> tuple[str, ...]:
        """Return the local files that the step reads. Their content determines the output."""
        return ()

    def fields(self) -> tuple[str, ...]:
        """Return the fields of a record that the step reads besides the text."""
        return ()

    def check(self) -> None:
        """Refuse the step if its files cannot be used."""

    def apply(self, batch: TextBatch) -> StepResult:
        """Judge the living documents of a batch."""
        raise NotImplementedError


def step_class(name: str) -> type[CurationStep]:
    """Return the class of a registered step."""
    module = importlib.import_module(f"argosy.data.curate.{STEPS[name]}")
    found: type[CurationStep] = module.Step
    return found

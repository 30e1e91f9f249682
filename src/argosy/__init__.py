"""Argosy: from raw text to a trained language model. One program, one run spec, from one CPU to thousands of GPUs.

The public Python API is what `__all__` names; `docs/python.md` describes it. Names are loaded when they are first used,
so that `import argosy` imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.api.datasets import CorpusDataset as CorpusDataset
    from argosy.api.datasets import SampleDataset as SampleDataset
    from argosy.api.models import TextGenerator as TextGenerator
    from argosy.api.models import generate_text as generate_text
    from argosy.api.models import load_model as load_model
    from argosy.api.models import load_tokenizer as load_tokenizer
    from argosy.api.run_specs import Metrics as Metrics
    from argosy.api.run_specs import Plan as Plan
    from argosy.api.run_specs import PlannedLayout as PlannedLayout
    from argosy.api.run_specs import plan_run as plan_run
    from argosy.api.run_specs import read_metrics as read_metrics
    from argosy.api.run_specs import resolve_run as resolve_run
    from argosy.api.training import OnRecord as OnRecord
    from argosy.api.training import TrainedRun as TrainedRun
    from argosy.api.training import train_run as train_run
    from argosy.config.schema import RunSpec as RunSpec
    from argosy.data.text.tokenizer import Tokenizer as Tokenizer
    from argosy.errors import ArgosyError as ArgosyError

__version__ = "0.1.0"

# Quiet as a library: without this, Python prints warnings of a logger that has no handler.
logging.getLogger("argosy").addHandler(logging.NullHandler())

_HOMES = {
    "ArgosyError": "argosy.errors",
    "CorpusDataset": "argosy.api.datasets",
    "Metrics": "argosy.api.run_specs",
    "OnRecord": "argosy.api.training",
    "Plan": "argosy.api.run_specs",
    "PlannedLayout": "argosy.api.run_specs",
    "RunSpec": "argosy.config.schema",
    "SampleDataset": "argosy.api.datasets",
    "TextGenerator": "argosy.api.models",
    "Tokenizer": "argosy.data.text.tokenizer",
    "TrainedRun": "argosy.api.training",
    "generate_text": "argosy.api.models",
    "load_model": "argosy.api.models",
    "load_tokenizer": "argosy.api.models",
    "plan_run": "argosy.api.run_specs",
    "read_metrics": "argosy.api.run_specs",
    "resolve_run": "argosy.api.run_specs",
    "train_run": "argosy.api.training",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

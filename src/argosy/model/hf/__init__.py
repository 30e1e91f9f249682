"""Weights in Hugging Face's names and layouts, both ways.

`table.py` is the language: what one of our parameters is made of, converted one at a time so that no model has to fit
in memory. Each family has a file with its table; `families.py` says which table a model has.
"""

from argosy.model.hf.families import Family, entries, family_of
from argosy.model.hf.table import Entry, from_hf, to_hf

__all__ = ["Entry", "Family", "entries", "family_of", "from_hf", "to_hf"]

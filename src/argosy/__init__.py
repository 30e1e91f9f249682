"""Argosy: from raw text to a trained language model. One program, one run spec, from one CPU to thousands of GPUs."""

__version__ = "0.1.0"

"""Hugging Face model directories: read weights, import, export, verify. `argosy.families` has the weight tables."""

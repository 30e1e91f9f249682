"""Model directories of Hugging Face: reading their weights, importing, exporting, verifying. `argosy.families` has the tables."""

"""Tasks: what a model is trained on. Each module is one task, from its section of the run spec to what `argosy sample` does."""

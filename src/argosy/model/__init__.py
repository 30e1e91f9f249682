"""Plain PyTorch models built from a model spec. They contain no collectives and no process groups."""

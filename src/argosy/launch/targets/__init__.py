"""What starts a run: one module for each target, registered in `argosy.config.targets`."""

"""The launch targets, one module each, registered in `argosy.config.targets`."""

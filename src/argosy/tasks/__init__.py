"""Training tasks. Each task module has everything from a section of the run spec to the behaviour of `argosy sample`."""
